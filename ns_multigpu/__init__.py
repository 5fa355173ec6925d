"""Trains one 3D Gaussian Splatting model on several GPUs: a plugin for Nerfstudio and gsplat."""

__version__ = "0.1.0"
