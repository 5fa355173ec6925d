"""Primitives, one package each, and their shared parts: the order of a model's points, and deterministic operations."""
