"""Add optional features that use a plan or a workload. Extras may import all core packages.

The core imports none of them, with the exceptions that are listed in tests/test_layers.py.
"""
