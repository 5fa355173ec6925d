"""Training scenes: points and images, generated in every run."""
