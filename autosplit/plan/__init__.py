"""Define the plan: its values, JSON, checks and explanation, its export to other tools, and the methods that use it.

Read `record` (the values) and `plan` (the methods) first. Modules of this package may import the package root,
`devices`, `solve` and `probe.check_result`. Methods that need `parallel` and `runtime` import them when they are
called.
"""
