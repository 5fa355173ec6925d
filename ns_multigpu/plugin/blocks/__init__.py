"""Runs of steps that go through the kernels: when they end, their graphs, capacities and storage."""
