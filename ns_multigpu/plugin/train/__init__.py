"""The training loop, its pipeline and configuration; resuming from a checkpoint."""
