"""Operators on tiles: lists of splats, pixels, their gradients."""
