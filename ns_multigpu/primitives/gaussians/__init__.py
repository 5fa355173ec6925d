"""The 3D Gaussian: its schema, its functions and kernels, and what grows and prunes it."""
