"""Run and measure training steps on accelerators, CPUs and simulated GPUs, or in a child process.

Read `protocol` (the interface of a worker) and `trainee` (the step that all workers run) first.
"""
