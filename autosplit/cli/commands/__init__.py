"""Run the commands, with one module for each. A command prints its answer and returns the exit code."""
