"""Everything that talks to a person: commands, tables, the page, JSON, exit codes.

May import all packages but integrations. Begin with `main` (the flags) and `commands` (a module for each command).
"""
