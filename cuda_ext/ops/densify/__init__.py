"""Operators that move, copy and perturb points."""
