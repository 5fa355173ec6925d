"""Results of a CUDA graph of some operators."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


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
