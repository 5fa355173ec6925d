"""The capture: its views and images, the ranks that hold them, and the checks before training."""
