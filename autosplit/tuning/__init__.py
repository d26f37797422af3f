"""`tune` and `measure`: measure, search and assemble the plan, in one process or on all ranks of a job.

May import the root, devices, solve, workload, runtime, probe, plan, profiles and ddp. Begin with `tune` (it
composes) and `session` (it measures and searches).
"""
