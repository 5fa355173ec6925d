"""Images for the viewer, for evaluation and for video, rendered by all ranks."""
