"""Training of splats in a run: configuration, pipeline, objective and what they choose from the capture."""
