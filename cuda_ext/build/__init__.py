"""How the shared libraries are compiled: the CPU operators, the CUDA operators, and the toolkit they need."""
