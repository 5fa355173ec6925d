"""One radiance field over disjoint cells of space, after NeRF-XL. Torch only: fields are in `plugin.radiance`."""
