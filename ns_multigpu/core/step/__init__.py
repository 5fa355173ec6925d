"""The training step composed of a strategy's pieces and a primitive's kernels."""
