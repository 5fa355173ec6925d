"""The order over ranks compared with one rank's stable sort, and exchanged rows with the expected ones."""

import weakref
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ns_multigpu.core.assign.placement import NewPoints, PlacementResult
from ns_multigpu.core.assign.splitters import find_splitters, imbalance
from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.primitives.densify import sharded_rows
from ns_multigpu.primitives.densify.index_map import Regrouping
from ns_multigpu.primitives.densify.sharded_rows import OptimizerStates, move_rows
from ns_multigpu.primitives.sharded_order import PointMove, Reordering, Survey, common_grid, order_keys, plan_move
from tests.lib.placements import HalfSpaces
from tests.lib.ranks import run_ranks

LAST = (1 << 62) - 1
CASES = ("random", "one has all", "some have none", "nothing", "one key", "few keys", "in order", "no work")
CASES += ("uneven work", "nearly even", "ends of the range")


def rows_of(case: str, size: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and weights that each rank starts with."""
    g = keyed_generator("order", case, size)
    counts = [int(torch.randint(40, 90, (1,), generator=g)) for _ in range(size)]
    if case == "one has all":
        counts = [150 if rank == size - 1 else 0 for rank in range(size)]
    elif case == "some have none":
        counts = [0 if rank % 2 == 0 else 61 for rank in range(size)]
    elif case == "nothing":
        counts = [0] * size
    elif case in ("nearly even", "in order"):
        counts = [100 + rank for rank in range(size)]
    found: list[tuple[Tensor, Tensor]] = []
    for rank, count in enumerate(counts):
        keys = torch.randint(LAST, (count,), generator=g)
        weights = torch.full((count,), 8)
        if case == "one key":
            keys.fill_(12345)
        elif case == "few keys":
            keys %= 3
        elif case == "in order":
            keys = torch.arange(count) + 1000 * rank
        elif case == "ends of the range":
            keys[::2], keys[1::3] = 0, LAST
        if case == "uneven work":
            weights = torch.where(keys < LAST // 5, 40, torch.randint(1, 5, (count,), generator=g))
        elif case == "no work":
            weights.zero_()
        found.append((keys, weights))
    return found


def reorder(world: World, case: str) -> tuple[PointMove, Reordering, dict[str, Tensor], int]:
    """Move rows that contain their origin, and their weights."""
    keys, weights = rows_of(case, world.size)[world.rank]
    ids = torch.stack([torch.full_like(keys, world.rank), torch.arange(len(keys))], dim=1)
    sorted_keys, order = torch.sort(keys, stable=True)
    params: dict[str, Any] = {
        "keys": torch.nn.Parameter(keys, requires_grad=False),
        "ids": torch.nn.Parameter(ids, requires_grad=False),
        "weights": torch.nn.Parameter(weights, requires_grad=False),
    }
    none = order[:0]
    world.traffic.since(case)
    works = [int(w.sum()) for _, w in rows_of(case, world.size)]
    move = plan_move(sorted_keys, weights[order], works, world, 1.1)
    regrouping = Regrouping(order, none, none, torch.zeros(0, 3))
    row_bytes = move_rows(params, {}, regrouping, move, OptimizerStates.here(params, {}), world)
    return move, move.record(0.0, row_bytes), {n: v.detach() for n, v in params.items()}, world.traffic.since(case)


def reorder_all(world: World) -> dict[str, Any]:
    return {case: reorder(world, case) for case in CASES}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_order_of_the_whole(size: int) -> None:
    outcomes = run_ranks(reorder_all, size)
    for case in CASES:
        whole = rows_of(case, size)
        keys, order = torch.sort(torch.cat([k for k, _ in whole]), stable=True)
        ids = [[rank, row] for rank, (k, _) in enumerate(whole) for row in range(len(k))]
        parts = [outcome[case][2] for outcome in outcomes]
        assert torch.equal(torch.cat([part["keys"] for part in parts]), keys), case
        assert torch.cat([part["ids"] for part in parts]).tolist() == [ids[int(k)] for k in order], case
        ends = [(int(p["keys"][0]), int(p["keys"][-1])) for p in parts if len(p["keys"])]
        assert all(a[1] < b[0] for a, b in pairwise(ends)), f"{case}: equal keys are on two ranks"

        record: Reordering = outcomes[0][case][1]
        assert len({(o[case][1].counts_after, o[case][1].bytes_sent) for o in outcomes}) == 1
        assert record.counts_before == tuple(len(k) for k, _ in whole)
        assert record.counts_after == tuple(len(part["keys"]) for part in parts)
        works = [int(part["weights"].sum()) for part in parts]
        assert record.imbalance_before == pytest.approx(imbalance([int(w.sum()) for _, w in whole]))
        assert record.imbalance_after == pytest.approx(imbalance(works))
        assert sum(o[case][3] for o in outcomes) == record.bytes_sent == record.moved * (8 + 8 + 16 + 8)
        assert record.rebalanced == (record.imbalance_before > 1.1)
        if case in ("uneven work", "one has all", "some have none") and size > 1:
            heaviest = max(int(w.max()) for _, w in whole if len(w))
            assert record.imbalance_after <= 1 + heaviest * size / sum(works) and record.moved > 0, case
            assert record.imbalance_after < 1.06, case
        if case in ("one has all", "random") and record.rebalanced:
            assert max(record.counts_after) - min(record.counts_after) <= 1, "equal work is equal numbers"
        if case == "in order":
            assert record.moved == 0 and record.counts_after == record.counts_before and not record.rebalanced
        assert "points in order" in str(record)


@pytest.mark.parametrize("span", [1, 5, 1000, LAST])
def test_splitters_are_as_near_as_can_be(span: int) -> None:
    g = keyed_generator("splitters", span)
    keys = torch.sort(torch.randint(span, (200,), generator=g)).values
    weights = torch.randint(0, 9, (200,), generator=g)
    total = int(weights.sum())
    targets = [*sorted(torch.randint(total + 1, (30,), generator=g).tolist()), total]
    sums = torch.nn.functional.pad(weights.cumsum(0), (1, 0))
    found = find_splitters(keys, sums, targets, World.single()).tolist()
    assert found == sorted(found)
    possible = [0, total, *(int(weights[keys < key].sum()) for key in keys)]
    for target, splitter in zip(targets, found, strict=True):
        below = int(weights[keys < splitter].sum())
        assert abs(below - target) == min(abs(other - target) for other in possible)


def test_keys_are_of_one_box(size: int = 3) -> None:
    for outcome in run_ranks(boxed, size):
        assert outcome


def boxed(world: World) -> bool:
    """Return whether a rank's keys are what they would be with all points here; the first rank has none."""
    g = keyed_generator("boxes")
    means, categories = torch.randn(90, 3, generator=g), torch.randint(4, (90,), generator=g)
    bounds = [0, 0, *(90 * k // (world.size - 1) for k in range(1, world.size))]
    own = slice(bounds[world.rank], bounds[world.rank + 1])
    survey = Survey.of(means[own], torch.tensor(7 * world.rank), -world.rank, world)
    assert survey.works == tuple(7 * rank for rank in range(world.size))
    assert survey.tags == tuple(-rank for rank in range(world.size))
    assert survey.grid == common_grid(means[own], world) == common_grid(means, World.single())
    keys = order_keys(means[own], categories[own], survey.grid)
    return torch.equal(keys, order_keys(means, categories, common_grid(means, World.single()))[own])


SHAPES: dict[str, tuple[int, ...]] = {"wide": (15, 3), "flat": (), "thin": (3,), "none": (0, 3), "bare": (4,)}


def carried(world: World) -> tuple[dict[str, Tensor], list[float]]:
    """Move parameters of many shapes; the last rank alone has points, and the first was left behind in steps."""
    last = world.size - 1
    count = 50 if world.rank == last else 0
    params: dict[str, Any] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, shape in SHAPES.items():
        number = torch.arange(count, dtype=torch.float32).view(-1, *[1] * len(shape)).expand(count, *shape)
        params[name] = torch.nn.Parameter(number.clone(), requires_grad=name != "bare")
        if name == "bare":
            continue
        optimizer = optimizers[name] = torch.optim.Adam([params[name]])
        if world.rank in (0, last):
            optimizer.state[params[name]] = {
                "step": torch.tensor(7.0 if world.rank == last else 3.0),
                "exp_avg": number + 0.5,
                "exp_avg_sq": (number * 2).to(torch.bfloat16),
                "scale": torch.arange(count, dtype=torch.float32) * 3,
            }
    keys = torch.arange(count)
    kept = OptimizerStates.here(params, optimizers)
    tags = all_gather_ints([count, kept.tag], world)
    assert len({tag for _, tag in tags}) == world.size, "they have taken 3, 7 and no steps"
    move = plan_move(keys, torch.ones_like(keys), [many for many, _ in tags], world, 1.1)
    fresh = keys[keys % 10 == 4]
    edit = lambda name, rows, _: rows.neg_() if name in ("thin", "flat") else None  # noqa: E731
    kept = kept.agree([tag for _, tag in tags], world)
    move_rows(params, optimizers, Regrouping(keys, fresh, keys[:0], torch.zeros(0, 3)), move, kept, world, edit)
    found = {name: value.detach() for name, value in params.items()}
    steps: list[float] = []
    for name, optimizer in optimizers.items():
        assert optimizer.param_groups[0]["params"] == [params[name]] and list(optimizer.state) == [params[name]]
        state = optimizer.state[params[name]]
        steps.append(float(state["step"]))
        found |= {f"{name}.{key}": value for key, value in state.items() if key != "step"}
    assert all(params[name].requires_grad == (name != "bare") for name in params)
    return found, steps


def carried_by_parts(world: World) -> tuple[dict[str, Tensor], list[float]]:
    """Return the same for rows that are too many for one message."""
    sharded_rows._AT_ONCE = 0
    return carried(world)


@pytest.mark.parametrize(("size", "carry"), [(1, carried), (3, carried), (3, carried_by_parts)])
def test_all_tensors_of_a_point_are_exchanged(size: int, carry: Any) -> None:
    outcomes = run_ranks(carry, size)
    number = torch.arange(50, dtype=torch.float32)
    kept = torch.where(number % 10 == 4, 0.0, 1.0)
    bounds = [0, *accumulate(len(found["flat"]) for found, _ in outcomes)]
    assert max(b - a for a, b in pairwise(bounds)) <= 50 // size + 1
    assert all(steps == [7.0] * 4 for _, steps in outcomes), "a rank that gets points goes on from the others' steps"
    for name, shape in SHAPES.items():
        sign = -1.0 if name in ("thin", "flat") else 1.0
        wanted = {name: sign * number}
        if name != "bare":
            wanted |= {f"{name}.exp_avg": kept * (number + 0.5), f"{name}.exp_avg_sq": kept * number * 2}
        for key, value in wanted.items():
            whole = torch.cat([found[key] for found, _ in outcomes])
            assert whole.shape == (50, *shape)
            assert torch.equal(whole.float(), value.view(-1, *[1] * len(shape)).expand(50, *shape)), key
            assert whole.dtype == (torch.bfloat16 if key.endswith("_sq") else torch.float32)
        if name != "bare":
            assert torch.equal(torch.cat([found[f"{name}.scale"] for found, _ in outcomes]), kept * number * 3)


def test_refusal() -> None:
    with pytest.raises(ValueError, match=r"at least 1, not 0\.9"):
        plan_move(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), [0], World.single(), 0.9)


def freed(world: World) -> list[int]:
    """Return the numbers of freed old parameters as each of three parameters is rebuilt."""
    mine = torch.arange(world.rank, 40, world.size)
    arrays = [np.zeros((len(mine), 4), np.float32) for _ in range(3)]
    alive = [weakref.ref(array) for array in arrays]
    params = {str(number): torch.nn.Parameter(torch.from_numpy(array)) for number, array in enumerate(arrays)}
    del arrays
    found: dict[str, int] = {}

    def edit(name: str, *_: Any) -> None:
        found[name] = sum(one() is None for one in alive)

    works = [len(range(rank, 40, world.size)) for rank in range(world.size)]
    move = plan_move(mine, torch.ones_like(mine), works, world, 1.1)
    assert (move.moved > 0) == (world.size > 1)
    regrouping, kept = (
        Regrouping(move.in_sending_order(mine) * 0, mine[:0], mine[:0], torch.zeros(0, 3)),
        OptimizerStates.here(params, {}),
    )
    move_rows(params, {}, regrouping, move, kept, world, edit)
    return list(found.values())


@pytest.mark.parametrize("size", [1, 2])
def test_old_rows_are_freed_one_parameter_after_the_other(size: int) -> None:
    assert run_ranks(freed, size) == [[0, 1, 2]] * size


class RoundRobin(HalfSpaces):
    """Owners by parity of the first coordinate, but for every tenth point, which is the next rank's."""

    def place(self, new: NewPoints, world: World) -> PlacementResult:
        x = new.positions()[:, 0].long()
        return PlacementResult((x + (x % 10 == 3).long()) % world.size)


def parted(world: World, at_once: int) -> dict[str, Any]:
    """Points with x = rank, rank + size, ...: every tenth is sent away. Children's offsets identify split points."""
    sharded_rows._AT_ONCE = at_once
    sent: list[tuple[int, int]] = []
    exchange = sharded_rows.exchange_rows

    def watched(x: Tensor, *rest: Any) -> Tensor:
        sent.append((len(x), x.shape[1]))
        return exchange(x, *rest)

    sharded_rows.exchange_rows = watched
    x = torch.arange(world.rank, 90, world.size)
    means = torch.stack([x.float(), torch.zeros(len(x)), torch.zeros(len(x))], 1)
    wide = x[:, None].float().expand(-1, 40).contiguous()
    params = {"means": torch.nn.Parameter(means), "wide": torch.nn.Parameter(wide)}
    optimizers = {name: torch.optim.Adam([param]) for name, param in params.items()}
    for name, param in params.items():
        optimizers[name].state[param] = {"step": torch.tensor(1.0), "exp_avg": param.detach() + 1}
    fresh, children = torch.where(x % 4 == 1)[0], torch.where(x % 8 == 1)[0]
    offsets = torch.stack([torch.zeros(len(children)), x[children].float(), torch.zeros(len(children))], 1)
    works = [int((torch.arange(rank, 90, world.size) ** 2).sum()) for rank in range(world.size)]
    move = plan_move(2 * x, x**2, works, world, 1.1, RoundRobin(), lambda: means, lambda: x)
    owners = torch.arange(90) + (torch.arange(90) % 10 == 3).long()
    held = torch.zeros(world.size, dtype=torch.int64).index_add_(0, owners % world.size, torch.arange(90) ** 2)
    assert move.imbalance_after == imbalance(held.tolist())
    row_of = torch.empty_like(x).scatter_(0, move.in_sending_order(torch.arange(len(x))), torch.arange(len(x)))
    regrouping = Regrouping(move.in_sending_order(torch.arange(len(x))), row_of[fresh], row_of[children], offsets)

    def edit(name: str, rows: Tensor, part: Regrouping) -> None:
        if name == "means":
            rows[part.children] += part.offsets

    move_rows(params, optimizers, regrouping, move, OptimizerStates.here(params, optimizers), world, edit)
    averages = {f"{name}.exp_avg": optimizers[name].state[param]["exp_avg"] for name, param in params.items()}
    return {name: value.detach() for name, value in params.items()} | averages | {"sent": sent, "places": move.places}


@pytest.mark.parametrize("at_once", [0, 1 << 26])
def test_only_points_with_a_new_owner_are_exchanged(at_once: int) -> None:
    outcomes = run_ranks(parted, 2, at_once)
    x = torch.arange(90)
    owners = (x + (x % 10 == 3).long()) % 2
    for rank, found in enumerate(outcomes):
        mine = x[owners == rank].float()
        assert torch.equal(found["places"].float(), mine)
        born = torch.where(mine % 8 == 1, mine, 0.0)
        assert torch.equal(found["means"], torch.stack([mine, born, torch.zeros(len(mine))], 1))
        assert torch.equal(found["wide"], mine[:, None].expand(-1, 40))
        kept = (mine % 4 != 1).float()
        assert torch.equal(found["wide.exp_avg"], (kept * (mine + 1))[:, None].expand(-1, 40))
        assert torch.equal(found["means.exp_avg"][:, 0], kept * (mine + 1))
        leaving = int(((x % 2 == rank) & (owners != rank)).sum())
        assert {rows for rows, _ in found["sent"]} == {leaving} and sum(w for _, w in found["sent"]) == 4 * 2 * 43
        assert len(found["sent"]) == 1 if at_once else all(width <= 64 for _, width in found["sent"])
