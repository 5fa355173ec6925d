"""Checkpoints, written atomically by all ranks and read on any number of ranks."""
