"""Shared parts of benchmarks: clocks, ranks, and the provenance of figures."""
