"""Operators that pack, send and receive rows and pixels."""
