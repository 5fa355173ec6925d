"""What serves an operator here: schemas, the compiled libraries, gsplat's kernels, or the reference."""
