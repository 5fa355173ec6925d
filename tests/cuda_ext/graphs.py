"""Tests of our CUDA kernels: where they run, and results of a CUDA graph of some operators."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

import cuda_ext

T = TypeVar("T")
OUR_KERNELS = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_ext.backend("cuda") != "native", reason="NS_MULTIGPU_OPS says so"),
]
"""Marks of tests that are skipped without a GPU, or where other operators serve on it."""


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of `run`, and what it returned while it was captured: tensors that each replay writes. It runs
    once before, for what a capture must not do, such as loading kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def check_replays(
    run: Callable[[], Sequence[Tensor]], change: Callable[[float], object] = float, by: Sequence[float] = (0.0,)
) -> list[Tensor]:
    """Check that a graph of `run` gives its results to the bit, after each of these changes; return the last ones."""
    graph, kept = captured(run)
    found: list[Tensor] = []
    for amount in by:
        change(amount)
        for one in kept:
            one.zero_()
        graph.replay()
        found = [one.clone() for one in kept]
        assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))
    return found
