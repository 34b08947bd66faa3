"""Where the worker runs: executors take a plan and give a handle on its result."""
