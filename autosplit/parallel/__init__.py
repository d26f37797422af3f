"""Training in one process: BalancedDataParallel, and an epoch cut into optimizer steps.

May import the root, devices, solve and workload. Begin with `balanced` (the wrapper) and `optimizer_steps`.
"""
