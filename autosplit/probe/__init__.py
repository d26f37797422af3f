"""Measurements of a workload that runs: ceilings, times, and whether splitting changes its gradient.

May import the root, devices, solve, workload, parallel and runtime. Begin with `prober` and `gradient_check`.
"""
