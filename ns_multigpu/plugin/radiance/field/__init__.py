"""The radiance field: cells' fields, samplers, backgrounds."""
