"""The commands' bodies, a module for each: what `cli` parses runs here, prints its answer and returns the exit code."""
