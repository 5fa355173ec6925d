"""Densification of points on one rank and of shards: adding, splitting, moving and removing them."""
