"""Pure arithmetic: splits, the cost of a step, the fastest configuration under it, and the search over it; no torch.

May import the root. Begin with `split` (the rule of uneven shares) and `solver` (the fastest configuration).
"""
