"""The model as a file for other programs."""
