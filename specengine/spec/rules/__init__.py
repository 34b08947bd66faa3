"""Rules of acceptance, one file each: exact ways to decide a drafted tree with the target's laws."""
