"""Tests of our CUDA kernels: where they run, and results of a CUDA graph of some operators."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

import cuda_ext

T = TypeVar("T")
OUR_KERNELS = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_ext.backend("cuda") != "native", reason="NS_MULTIGPU_CUDA or NS_MULTIGPU_OPS says so"),
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
