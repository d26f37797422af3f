"""Run and measure training steps on accelerators, CPUs and simulated GPUs, or in a child process.

May import the root, devices, solve, workload and parallel. Begin with `protocol` (the interface of a runtime) and
`trainee` (the step that all runtimes run).
"""
