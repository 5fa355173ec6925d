"""The training step, composed of a strategy's legs and a primitive's kernels."""
