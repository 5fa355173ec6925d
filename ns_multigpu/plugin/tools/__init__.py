"""Evaluating and rendering a trained model with several workers."""
