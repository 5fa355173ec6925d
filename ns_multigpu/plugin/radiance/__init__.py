"""`nerfacto-xl`: nerfstudio's nerfacto split into cells of space, at least one per rank; after NeRF-XL."""
