"""Operators and complete steps on one device, compared with gsplat and the hardware's limits."""
