"""The command line: commands, tables, JSON and exit codes.

May import all packages but integrations. Begin with `main` (the flags) and `commands` (a module for each command).
"""
