"""The 4D Gaussian: a Gaussian over space and time, for dynamic scenes (Yang et al. 2024)."""
