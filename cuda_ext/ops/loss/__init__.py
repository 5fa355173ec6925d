"""Operators of the loss."""
