"""Faults during a run: their detection, and the errors and reports for the user."""
