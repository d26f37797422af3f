"""Workloads, described and never run: model, batch, loss, optimizer, precision, and their fingerprint.

May import the root and devices. Begin with `workload`.
"""
