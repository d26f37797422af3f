"""Plans that are remembered: what they hold for, where they are kept, whether they still hold.

May import the root, devices, solve, workload and plan. Begin with `store`.
"""
