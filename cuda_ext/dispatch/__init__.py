"""Dispatch of operators to the compiled libraries or the reference; and their schemas."""
