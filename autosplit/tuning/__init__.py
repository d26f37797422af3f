"""`tune` and `compare`: measure, search, put the plan together, alone or by all ranks of a job.

May import the root, devices, solve, workload, runtime, probe, plan, profiles and ddp. Begin with `tune` (it
composes) and `session` (it measures and searches).
"""
