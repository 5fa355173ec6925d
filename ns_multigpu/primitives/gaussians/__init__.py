"""The 3D Gaussian: schema, functions, kernels and densifiers."""
