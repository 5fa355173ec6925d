"""What can go wrong during a run: what detects it, and the errors and reports that the user gets."""
