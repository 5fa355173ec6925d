"""Merge-path sort over all ranks."""
