"""Workloads, timing and reports of `specengine bench`."""
