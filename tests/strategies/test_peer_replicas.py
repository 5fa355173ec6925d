"""Replicas that write their rows into each other's memory take the step that `single` takes."""

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuda_ext import SplatRows, put_rows
from cuda_ext.ops.exchange.row_exchange import RECORD_FLOATS
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange import replicated_rows
from ns_multigpu.core.exchange.replicated_rows import PeerReplicas
from ns_multigpu.core.kernels import PutRows
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels, GaussianReplicaRows
from strategies import STRATEGIES
from tests.lib.ranks import run_ranks
from tests.strategies import test_law_steps
from tests.strategies.shared_memory import SharedFile
from tests.strategies.test_law_steps import (
    KERNELS,
    LANDSCAPE,
    MODES,
    OTHERS,
    POINTS,
    check_outcomes,
    check_step,
    count_of,
    one_step,
    points_of,
    take_one,
)


def by_shared_memory(folder: Path, world: World, primitive: str, mode: str, *, sized: bool = True) -> Any:
    """Return a step of `batch` in which nothing but barriers goes through collectives."""
    SharedFile.folder = folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_rows, "PeerBuffer", SharedFile)
        usual, made = test_law_steps.make_transport, list[Any]()
        patch.setattr(
            test_law_steps, "make_transport",
            lambda *all, **some: made.append(usual(*all, **{**some, "peer": True})) or made[-1],
        )  # fmt: skip
        kind, whole = points_of(primitive, POINTS, torch.float32, world.device)
        sent = world.traffic.sent
        outcome = take_one(
            STRATEGIES["batch"](world),
            kind,
            count_of("batch"),
            LANDSCAPE,
            mode,
            whole=whole,
            **({} if sized else {"sized": False}),
        )
    assert [type(one) for one in made] == [PeerReplicas] and SharedFile.made == 1
    assert world.traffic.sent == sent, "no collective has carried rows"
    transport, most = made[0], sum(one.nbytes for one in made[0]._replicas.everyone) // world.size
    line = (transport.written_bytes(1, 7, 0) - transport.written_bytes(1, 6, 0)) // (world.size - 1)
    assert transport.written_bytes(1, 0, 0) == (world.size - 1) * transport._messages[0].nbytes
    lines = len(transport._replicas.everyone[0]) // world.size
    # Of the record of a 3D Gaussian's gradients a quarter means nothing.
    assert line == (most // lines if primitive == "4D gaussians" else 76 if sized else 64)
    return outcome


@pytest.mark.parametrize(
    ("primitive", "ranks", "mode"),
    [*((KERNELS[1], ranks, mode) for ranks in (2, 3) for mode in MODES), *((name, 2, "captured") for name in OTHERS)],
)
def test_a_step_through_each_others_memory_equals_single(tmp_path: Path, mode: str, ranks: int, primitive: str) -> None:
    check_step(run_ranks(partial(by_shared_memory, tmp_path), ranks, primitive, mode), "batch", primitive, LANDSCAPE)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_conics_equals_single(tmp_path: Path, mode: str) -> None:
    """Sizes on the screen are excepted, as they are not counted then."""
    outcomes = run_ranks(partial(by_shared_memory, tmp_path, sized=False), 2, KERNELS[1], mode)
    expected = one_step(World.single(), "single", KERNELS[1], count_of("batch"), POINTS, torch.float32, LANDSCAPE)
    for outcome in outcomes:
        outcome["statistics"][2] = 1.0
    check_outcomes(outcomes, expected, count_of("batch"), LANDSCAPE, replicated=True)


class Numbers:
    """Kernels of replicas that put one number, the step's."""

    def __init__(self, ranks: int) -> None:
        self.everyone, self.step = [torch.zeros(4 * ranks)], 0.0

    def to_put(self, *_: Any) -> PutRows:
        return PutRows([torch.tensor([self.step])], [1])

    def rows(self, counts: torch.Tensor) -> tuple[Any, torch.Tensor]:
        return SimpleNamespace(count=counts), self.everyone[0][::4]


def two_steps(folder: Path, world: World) -> list[list[float]]:
    """Return each rank's values of two steps, with rank 1 reading late."""
    SharedFile.folder = folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_rows, "PeerBuffer", SharedFile)
        numbers = Numbers(world.size)
        asked: list[int] = []
        kernels: Any = SimpleNamespace(
            record_floats=1,
            sized=True,
            receive_local=lambda *_: None,
            replicas=lambda _, lines, __: asked.append(lines) or numbers,  # type: ignore[func-returns-value]
        )
        transport = PeerReplicas(world, kernels, rows=1, capacity=1, words=1)
        assert asked == [4], "each rank's lines begin at a multiple of 16 bytes"
        found: list[list[float]] = []
        for step in (1, 2):
            numbers.step = float(10 * step + world.rank)
            rows: Any = SimpleNamespace(count=torch.tensor([1]))
            for parts in (
                transport.receive(rows, torch.empty(0), 1, []),
                transport.return_gradients(rows, torch.empty(0), torch.tensor([step]), range(1)),
            ):
                with pytest.raises(StopIteration) as end:
                    next(parts)
            if world.rank == 1:
                time.sleep(0.5)
            found.append([*end.value.value.records.tolist(), *end.value.value.messages.view(-1).tolist()])
    return found


def test_no_rank_overwrites_unread_data(tmp_path: Path) -> None:
    assert run_ranks(partial(two_steps, tmp_path), 2) == [[[10.0, 11.0, 1, 1], [20.0, 21.0, 2, 2]]] * 2


def without_sizes(folder: Path, world: World) -> tuple[int, list[bool]]:
    """Return the bytes put for a row, and which arrays are written, without counts of sizes."""
    SharedFile.folder = folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_rows, "PeerBuffer", SharedFile)
        transport = PeerReplicas(world, GaussianKernels(degree=0, sized=False), rows=8, capacity=8, words=1)
        ones = torch.ones(8, 3)
        ids, radii = torch.ones(8, dtype=torch.int32), torch.ones(8, 2, dtype=torch.int32)
        rows = SplatRows(ids, ids, torch.tensor([8]), ones[:, :2], ones, ones[:, 0], ones, ones[:, 0], radii)
        transport._table.fill_(1.0)
        with pytest.raises(StopIteration):
            next(transport.return_gradients(rows, torch.empty(0), torch.tensor([8]), range(1)))
        return transport.written_bytes(1, 1, 0) - transport.written_bytes(1, 0, 0), [
            bool(one.any()) for one in transport._replicas.everyone
        ]


def test_conics_are_put_for_sizes_only(tmp_path: Path) -> None:
    assert run_ranks(partial(without_sizes, tmp_path), 2) == [(76 - 12, [True, True, True, False, True])] * 2


def test_put_rows_equals_all_gather() -> None:
    """Of the rows that there are, the numbers that mean something; no gradient where a colour is clamped at black."""
    g, lines, capacity = torch.Generator().manual_seed(0), 5, 8
    floats = [torch.randn(capacity, *shape, generator=g) for shape in ((2,), (3,), (), (3,), ())]
    floats[3].clamp_(min=0.0)
    assert 0 < int((floats[3][:lines] == 0).sum()) < 3 * lines
    ids, radii = torch.arange(capacity, dtype=torch.int32), torch.ones(capacity, 2, dtype=torch.int32)
    rows = SplatRows(ids // 4, ids, torch.tensor([lines]), *floats, radii)
    records = torch.randn(capacity, RECORD_FLOATS, generator=g)
    replicas = GaussianReplicaRows(capacity, torch.device("cpu"))
    put = replicas.to_put(rows, records, 3)
    places = torch.tensor([[one.data_ptr() for one in replicas.everyone]])
    put_rows(put.arrays, put.taken, rows.count, places, put.gate, put.gate_column, put.offset)
    for there, mine in zip(replicas.everyone, replicas.mine(rows, records.clone(), 3), strict=True):
        wide = there.dim() == 2 and there.shape[1] == RECORD_FLOATS
        expected = mine[:lines, :12] if wide else mine[:lines]
        assert torch.equal(there[:lines, :12] if wide else there[:lines], expected)
        assert not bool(there[lines:].any()) and bool(expected.any())
