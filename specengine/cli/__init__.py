"""The `specengine` command: one module a subcommand; importing them costs nothing heavy."""
