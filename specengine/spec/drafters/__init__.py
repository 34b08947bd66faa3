"""Drafters, one file each; the module's name is the method's name."""
