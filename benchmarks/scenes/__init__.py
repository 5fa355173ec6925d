"""Scenes to train on: points and images, made anew in every run."""
