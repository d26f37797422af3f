"""Define `tune` and `measure`: measure, search and assemble the plan, in one process or on all ranks of a job.

Read `tune` (the order of the stages) and `run` (what the stages share) first.
"""
