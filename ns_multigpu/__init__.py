"""Trains one 3D Gaussian Splatting model on several GPUs: a plugin for Nerfstudio and gsplat."""

from ns_multigpu._moved import know_old_names

__version__ = "0.1.0"

know_old_names()
