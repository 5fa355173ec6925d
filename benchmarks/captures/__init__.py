"""Complete runs on real captures: quality and speed, compared with splatfacto and gsplat."""
