"""Optional features that use a plan or a workload. The core imports none of them.

The exceptions are listed in tests/test_layers.py. Extras may import all core packages.
"""
