"""Whole runs on real captures: quality and speed, beside splatfacto and gsplat."""
