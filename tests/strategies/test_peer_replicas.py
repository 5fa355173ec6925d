"""Replicas that write their rows into each other's memory take the step that `single` takes."""

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ns_multigpu.core import staying_rows
from ns_multigpu.core.kernels import ToldLines
from ns_multigpu.core.staying_rows import PeerReplicas
from ns_multigpu.core.world import World
from strategies import STRATEGIES
from tests.ranks import run_ranks
from tests.strategies import test_law_steps
from tests.strategies.shared_memory import SharedFile
from tests.strategies.test_law_steps import (
    KERNELS,
    LANDSCAPE,
    MODES,
    OTHERS,
    POINTS,
    check_step,
    count_of,
    points_of,
    take_one,
)


def by_shared_memory(folder: Path, world: World, primitive: str, mode: str) -> Any:
    """A step of `batch` in which nothing but barriers goes through collectives."""
    SharedFile.folder = folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staying_rows, "PeerBuffer", SharedFile)
        usual, made = test_law_steps.make_transport, list[Any]()
        patch.setattr(
            test_law_steps, "make_transport",
            lambda *all, **some: made.append(usual(*all, **{**some, "peer": True})) or made[-1],
        )  # fmt: skip
        kind, whole = points_of(primitive, POINTS, torch.float32, world.device)
        sent = world.traffic.sent
        outcome = take_one(STRATEGIES["batch"](world), kind, count_of("batch"), LANDSCAPE, mode, whole=whole)
    assert [type(one) for one in made] == [PeerReplicas] and SharedFile.made == 1
    assert world.traffic.sent == sent, "no collective has carried rows"
    told, most = made[0], sum(one.nbytes for one in made[0]._replicas.everyone) // world.size
    line = (told.step_bytes(7) - told.step_bytes(6)) // (world.size - 1)
    assert told.step_bytes(0) == (world.size - 1) * told._messages[0].nbytes
    lines = len(told._replicas.everyone[0]) // world.size
    # Of the record of a 3D Gaussian's gradients a quarter means nothing.
    assert line == (most // lines if primitive in OTHERS else 76)
    return outcome


@pytest.mark.parametrize("primitive", [KERNELS[1], *OTHERS])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_through_each_others_memory_equals_single(tmp_path: Path, mode: str, ranks: int, primitive: str) -> None:
    check_step(run_ranks(partial(by_shared_memory, tmp_path), ranks, primitive, mode), "batch", primitive, LANDSCAPE)


class Numbers:
    """Replicas that tell each other one number, the step's."""

    def __init__(self, ranks: int) -> None:
        self.everyone, self.step = [torch.zeros(4 * ranks)], 0.0

    def told(self, *_: Any) -> ToldLines:
        return ToldLines([torch.tensor([self.step])], [1])

    def rows(self, counts: torch.Tensor) -> tuple[Any, torch.Tensor]:
        return SimpleNamespace(count=counts), self.everyone[0][::4]


def two_steps(folder: Path, world: World) -> list[list[float]]:
    """What each rank finds in two steps, where rank 1 is late to look."""
    SharedFile.folder = folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staying_rows, "PeerBuffer", SharedFile)
        numbers = Numbers(world.size)
        kernels: Any = SimpleNamespace(record_floats=1, replicas=lambda *_: numbers)
        told = PeerReplicas(world, kernels, rows=1, capacity=1, words=1)
        found: list[list[float]] = []
        for step in (1, 2):
            numbers.step = float(10 * step + world.rank)
            rows: Any = SimpleNamespace(count=torch.tensor([1]))
            parts = told.bring_back(rows, torch.empty(0), torch.tensor([step]), range(1))
            with pytest.raises(StopIteration) as end:
                next(parts)
            if world.rank == 1:
                time.sleep(0.5)
            found.append([*end.value.value.records.tolist(), *end.value.value.messages.view(-1).tolist()])
    return found


def test_nobody_writes_what_another_has_still_to_read(tmp_path: Path) -> None:
    assert run_ranks(partial(two_steps, tmp_path), 2) == [[[10.0, 11.0, 1, 1], [20.0, 21.0, 2, 2]]] * 2
