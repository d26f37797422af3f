"""Define the plan: its values, JSON, checks and explanation, its export to other tools, and the methods that use it.

Read `record` (the values) and `plan` (the methods) first. Methods that need `parallel` and `runtime` import them when
they are called.
"""
