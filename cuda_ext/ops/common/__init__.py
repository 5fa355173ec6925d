"""Checks, clocks, tables and keys that other operators use."""
