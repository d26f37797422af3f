"""Use plans with `transformers`, `accelerate` and `lightning`. Each module imports its library only when it is used.

The library keeps its own loop, logs and checkpoints. autosplit gives it a loader with this process's part of every
micro-batch. It also sets the number of micro-batches per optimizer step, and weights every loss. The weighted losses
give the gradient of the whole step.
"""
