"""`nerfacto-xl`: nerfstudio's nerfacto in cells of space, one or more on each rank; after NeRF-XL."""
