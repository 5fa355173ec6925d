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
        late.send([view], counts, torch.tensor(True, device=device))
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


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_learned_from_a_step_that_is_to_be_retried(device: str) -> None:
    work, late = sent(device)
    for taken in (True, False):
        late.send(VIEWS[:1], torch.full((1, 3), 7 + taken, device=device), torch.tensor(taken, device=device))
    late.learn(pending=0)
    assert work.counts[0] == [8, 8, 8]
