"""Run the command line: commands, tables, JSON and exit codes.

Modules of this package may import all packages except `integrations`. Begin with `parser` (the flags) and `commands`
(one module each).
"""
