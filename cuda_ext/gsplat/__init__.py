"""gsplat 1.4.0's kernels behind our operators."""
