"""The training loop, its pipeline and its configuration; going on from a checkpoint."""
