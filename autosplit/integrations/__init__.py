"""Plans in other tools' training: `transformers`, `accelerate`, `lightning`; each is imported where it is asked for.

A tool keeps its own loop, its logs, its checkpoints. What it gets is a loader that hands this process its share of
every micro-batch, the number of micro-batches of an optimizer step, and a weight for every loss, so that the gradient
is that of the whole step.
"""
