"""Run the command line: commands, tables, JSON and exit codes.

Read `parser` (the flags) and `commands` (one module each) first.
"""
