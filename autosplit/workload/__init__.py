"""Describe workloads without running them: model, batch, loss, optimizer, precision, and their fingerprint.

Read `workload` first.
"""
