"""Measure a running workload: ceilings, times, and whether splitting a batch changes its gradient.

Modules of this package may import the package root, `devices`, `solve`, `workload`, `parallel` and `runtime`. Begin
with `prober` and `gradient_check`.
"""
