"""What is found out of a workload by running it: ceilings, times, and whether splitting changes its gradient.

May import the root, devices, solve, workload, parallel and runtime. Begin with `prober` and `gradient_check`.
"""
