"""Use a plan or a workload beyond training: diagnose, report, measure loaders, plan for shards and lengths."""
