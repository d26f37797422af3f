"""Train in one process with `BalancedDataParallel`, and cut an epoch into optimizer steps.

Read `balanced` (the wrapper) and `epoch_steps` first.
"""
