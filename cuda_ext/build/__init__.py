"""Compilation of the CPU operators and the CUDA operators into shared libraries, and detection of the CUDA toolkit."""
