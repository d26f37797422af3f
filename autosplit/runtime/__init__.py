"""Run and measure training steps on accelerators, CPUs and simulated GPUs, or in a child process.

Read `protocol` (the interface of a runtime) and `trainee` (the step that all runtimes run) first.
"""
