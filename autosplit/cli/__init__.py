"""Run the command line: commands, tables, JSON and exit codes.

Modules of this package may import all packages except `integrations`. Begin with `main` (the flags) and `commands` (a
module for each command).
"""
