"""Methods that ours are compared with, composed of the product's pieces: no part of the product."""
