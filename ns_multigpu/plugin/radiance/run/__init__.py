"""Training run of a radiance field: objective, steps and checkpoints."""
