"""Compute splits, predict the time of a step, and search for the fastest configuration, without torch.

Modules of this package may import only each other and the package root. Begin with `split` (how a batch is split) and
`solver` (the fastest configuration).
"""
