"""Ownership of points and drawing of patches: placement, assignment, plan, views."""
