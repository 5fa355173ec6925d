"""Operators on points of a view: culling, projection, colours."""
