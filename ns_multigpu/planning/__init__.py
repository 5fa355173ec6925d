"""Estimates of a run's memory and time by arithmetic, without a GPU."""
