"""What goes wrong on purpose: bad inputs, and workers that are killed."""
