"""2D Gaussians (Huang et al. 2024): flat points, which lie on surfaces."""
