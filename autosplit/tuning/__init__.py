"""Define `tune` and `measure`: measure, search and assemble the plan, in one process or on all ranks of a job.

Read `tune` (the order of the steps) and `session` (measuring and searching) first. Modules of this package may import
the package root, `devices`, `solve`, `workload`, `runtime`, `probe`, `plan`, `profiles` and `ddp`.
"""
