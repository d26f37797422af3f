"""Measure a running workload: ceilings, times, and whether splitting a batch changes its gradient.

Read `prober` and `gradient_check` first. Modules of this package may import the package root, `devices`, `solve`,
`workload`, `parallel` and `runtime`.
"""
