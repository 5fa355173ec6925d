"""Rendering by all ranks, for the viewer, for evaluation and for video."""
