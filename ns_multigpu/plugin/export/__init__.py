"""Export of the model to file formats of other programs."""
