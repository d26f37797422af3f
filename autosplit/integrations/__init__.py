"""Use plans with `transformers`, `accelerate` and `lightning`. Each module imports its library only when it is used.

autosplit provides a loader with this process's part of every micro-batch, and sets the number of micro-batches per
optimizer step. It weights every loss, so the sum is the gradient of the whole step.
"""
