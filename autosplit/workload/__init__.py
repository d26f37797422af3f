"""What is trained, described and never run: model, batch, loss, optimizer, precision, and its fingerprint.

May import the root and devices. Begin with `workload`.
"""
