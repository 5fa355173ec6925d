"""Blocks of fused steps: block ends, CUDA graphs, capacities and point storage."""
