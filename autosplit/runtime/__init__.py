"""Runs a training step of a copy and measures it: on accelerators, the CPU, simulated cards, in a child process.

May import the root, devices, solve, workload and parallel. Begin with `protocol` (what a runtime is) and `trainee` (the
step that all of them run).
"""
