"""Compute splits, predict the time of a step, and search for the fastest configuration, without torch.

Read `split` (how a batch is split) and `solver` (the fastest configuration) first.
"""
