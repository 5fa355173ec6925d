"""Evaluation and rendering of a trained model with several workers."""
