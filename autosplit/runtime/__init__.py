"""Where a training step runs and is measured: cuda, cpu, sim."""
