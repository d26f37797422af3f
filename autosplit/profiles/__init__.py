"""Saved plans (profiles): their keys, their files, and whether a saved plan still fits this machine.

May import the root, devices, solve, workload and plan. Begin with `store`.
"""
