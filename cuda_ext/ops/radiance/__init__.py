"""Operators of radiance fields."""
