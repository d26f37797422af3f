"""Save plans as profiles: their keys, their files, and whether a saved plan still fits this machine.

Read `store` first.
"""
