"""Optional features that use a plan or a workload. No core package imports this one."""
