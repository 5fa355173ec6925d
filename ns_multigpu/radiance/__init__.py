"""One radiance field over disjoint cells of space; after NeRF-XL. Torch only: the fields themselves are `plugin.radiance`'s."""
