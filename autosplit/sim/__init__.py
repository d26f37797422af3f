"""Plan for GPUs that are not there: clusters, comparisons of machines, and models by name."""
