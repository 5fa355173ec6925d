"""Copies to the host's memory, also while another thread captures a CUDA graph."""

import threading

import pytest
import torch
from torch import Tensor

from ns_multigpu.plugin.blocks.graphs import GraphPool
from ns_multigpu.plugin.checkpoint.to_host import to_host

STREAMS = 32
"""Streams of a priority that torch hands out in turn."""


def test_copies_are_independent_and_contiguous() -> None:
    value = torch.arange(40_000.0).reshape(200, 200).T
    copy = to_host(value)
    expected = value.clone()
    value.zero_()
    assert copy.is_contiguous()
    assert torch.equal(copy, expected)


@pytest.mark.gpu
def test_copies_do_not_disturb_captures_of_another_thread() -> None:
    device = torch.device("cuda:0")
    value, total = torch.arange(100_000.0, device=device), torch.zeros(1, device=device)
    copies: list[Tensor] = []

    def copy_often() -> None:
        torch.cuda.set_device(device)
        copies.extend(to_host(value) for _ in range(STREAMS + 1))

    def part() -> None:
        total.add_(1)
        saver = threading.Thread(target=copy_often)
        saver.start()
        saver.join()
        total.add_(1)

    pool = GraphPool(device)
    pool.prepare()
    pool.capture(part).replay()
    assert total.item() == 2
    assert len(copies) == STREAMS + 1
    assert all(torch.equal(copy, value.cpu()) for copy in copies)
