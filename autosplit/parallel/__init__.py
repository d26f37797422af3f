"""Train in one process with `BalancedDataParallel`, and cut an epoch into optimizer steps.

This package may import the root, devices, solve and workload. To read it, begin with `balanced` (the wrapper) and
`optimizer_steps`.
"""
