"""What benchmarks share: clocks, ranks, and where a figure comes from."""
