"""Describe workloads without running them: model, batch, loss, optimizer, precision, and their fingerprint.

Modules of this package may import the package root and `devices`. Begin with `workload`.
"""
