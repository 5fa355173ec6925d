"""Operators and whole steps on one device, beside gsplat and the hardware's floors."""
