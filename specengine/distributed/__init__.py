"""Communication between the devices that share one model; this version runs on one."""
