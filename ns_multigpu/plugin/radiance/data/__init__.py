"""Rays and photographs that train a radiance field."""
