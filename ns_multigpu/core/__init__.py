"""Code shared by all strategies and primitives. It imports torch and `cuda_ext`, nothing else."""
