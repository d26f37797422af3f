"""Measure a running workload: ceilings, times, and whether splitting a batch changes its gradient.

Read `prober` and `gradient_check` first.
"""
