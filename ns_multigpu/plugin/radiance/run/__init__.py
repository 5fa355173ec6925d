"""The run of a radiance field: its objective, steps and checkpoints."""
