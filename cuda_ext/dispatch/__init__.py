"""Dispatch of operators to the compiled libraries, gsplat's kernels, or the reference; and their schemas."""
