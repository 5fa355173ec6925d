"""3D smooth convexes (Held et al. 2024): each the hull of six points, with edges of learned sharpness."""
