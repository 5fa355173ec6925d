"""Deliberate faults: bad inputs, and killed workers."""
