"""Training rays and photographs of a radiance field."""
