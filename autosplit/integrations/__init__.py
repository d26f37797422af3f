"""Use plans with `transformers`, `accelerate`, `lightning` and `ray`. Each module imports only its own library.

autosplit provides a loader with this process's part of every micro-batch, and sets the number of micro-batches per
optimizer step. It weights every loss, so the sum is the gradient of the whole step.
"""
