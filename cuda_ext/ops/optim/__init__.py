"""Operators that update points: Adam, deferred steps, the gate of a step."""
