"""The core: what every strategy and every primitive shares. It imports torch and `cuda_ext`, nothing else."""
