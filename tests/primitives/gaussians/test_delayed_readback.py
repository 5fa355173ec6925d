"""Counts are read back late, in order, and all of them on request."""

import pytest
import torch

from ns_multigpu.core.assign.tile_work import TileWork
from ns_multigpu.core.step.delayed_readback import LAG, DelayedReadback
from ns_multigpu.core.types import View
from tests.lib.ranks import DEVICES

VIEWS = [View(torch.eye(4), torch.eye(3), 48, 40, index) for index in range(LAG + 3)]


def sent(device: str) -> tuple[TileWork, DelayedReadback]:
    work = TileWork()
    late = DelayedReadback(work.learn)
    counts = torch.zeros(1, 3, dtype=torch.int64, device=device)
    for view in VIEWS:
        counts.copy_(torch.arange(3) + 10 * view.index)  # the same tensor each time, as a step's is
        late.send([view], counts)
    return work, late


def expected(views: list[View]) -> dict[int, list[int]]:
    return {view.index: [10 * view.index + k for k in range(3)] for view in views}


@pytest.mark.parametrize("device", DEVICES)
def test_counts_of_the_last_step_remain_pending(device: str) -> None:
    work, late = sent(device)
    assert work.counts == {}, "no readback before a request"
    late.learn()
    assert work.counts == expected(VIEWS[:3])
    late.learn()
    assert work.counts == expected(VIEWS[:3])
    late.learn(pending=0)
    assert work.counts == expected(VIEWS)
