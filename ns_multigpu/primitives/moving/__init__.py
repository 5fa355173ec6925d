"""The 4D Gaussian: a Gaussian over space and time, for scenes that move (Yang et al. 2024)."""
