"""Operators of the merge-path sort over all GPUs."""
