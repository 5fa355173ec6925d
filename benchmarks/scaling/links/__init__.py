"""A link between two processes of one host that is as slow as one between machines, and what trains over it."""
