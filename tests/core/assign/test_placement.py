"""Positions of rows on any rank, the shard index of a whole model, and random draws by position."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ns_multigpu.core.assign.global_order import GlobalOrder
from ns_multigpu.core.assign.placement import Sharded, Shares, shares_of
from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.core.types import Points
from tests.lib.placements import HalfSpaces
from tests.lib.ranks import run_ranks

CASES = ("random", "few keys", "one key", "one has all", "nothing", "ends of the range")
LAST = (1 << 62) - 1


def rows(case: str, size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keys, ties (each another one) and values of each rank."""
    g = keyed_generator("ranking", case, size)
    counts = [17 + 20 * rank for rank in range(size)]
    if case in ("one has all", "nothing"):
        counts = [40 if rank == size - 1 and case != "nothing" else 0 for rank in range(size)]
    span = {"few keys": 4, "one key": 1}.get(case, LAST)
    keys = [torch.randint(span, (count,), generator=g) for count in counts]
    if case == "ends of the range":
        for some in keys:
            some[::2], some[1::3] = 0, LAST
    ties = torch.randperm(sum(counts), generator=g).split(counts)
    return [(k, t, torch.randint(9, (len(k),), generator=g)) for k, t in zip(keys, ties, strict=True)]


def ranked(world: World) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for case in CASES:
        keys, ties, values = rows(case, world.size)[world.rank]
        ranking = GlobalOrder.of(keys, world, ties)
        found[case] = ranking.places, ranking.before(values), GlobalOrder.of(keys, world).places
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_places_among_all_rows(size: int) -> None:
    outcomes = run_ranks(ranked, size)
    for case in CASES:
        keys, ties, values = (torch.cat(list(column)) for column in zip(*rows(case, size), strict=True))
        places, before, untied = (
            torch.cat(list(column)) for column in zip(*(outcome[case] for outcome in outcomes), strict=True)
        )
        order = torch.sort(ties).indices
        order = order[torch.sort(keys[order], stable=True).indices]
        assert torch.equal(places[order], torch.arange(len(keys))), case
        assert torch.equal(before[order], values[order].cumsum(0) - values[order]), case
        assert torch.equal(untied[torch.sort(keys, stable=True).indices], torch.arange(len(keys))), case


def met(world: World) -> tuple[int, int]:
    """Return the number of collectives that rank keys of one large shard need, and the number of keys received."""
    meetings: list[str] = []
    for name in ("all_gather_into_tensor", "all_to_all_single", "all_gather", "all_reduce"):
        call = getattr(dist, name)
        setattr(dist, name, lambda *args, name=name, call=call, **more: (meetings.append(name), call(*args, **more))[1])
    g = keyed_generator("met", world.rank)
    keys = torch.sort(torch.randint(LAST, (60_000 if world.rank == 0 else 600,), generator=g)).values
    ranking = GlobalOrder.of(keys, world, torch.arange(len(keys)), ascending=True)
    return len(meetings), len(ranking._order)


def test_ranking_needs_few_collectives_and_shares_sorting() -> None:
    outcomes = run_ranks(met, 3)
    assert [meetings for meetings, _ in outcomes] == [5] * 3
    assert max(rows for _, rows in outcomes) < 1.1 * 61_200 / 3


def held(world: World) -> list[list[Tensor]]:
    """Return the results of a shard index of ranges, and of points distributed round-robin."""
    bounds = Sharded().shares(31, lambda: torch.zeros(31, 3), world.size)[world.rank]
    assert isinstance(bounds, range)
    mine = torch.arange(bounds.start, bounds.stop)
    found: list[list[Tensor]] = []
    for places in (None, torch.arange(world.rank, 31, world.size)):
        shard_index = ShardIndex(HalfSpaces(), places)
        where = mine if places is None else places
        chosen = torch.where(where % 3 == 1)[0]
        totals = list(zip(*all_gather_ints([len(chosen), int((where**2).sum())], world), strict=True))
        found.append([
            where, shard_index.places_of(torch.arange(len(where)), len(where), world), chosen,
            shard_index.among(chosen, len(where), totals[0], world), shard_index.before(where**2, totals[1], world),
        ])  # fmt: skip
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shard_rows_map_to_rows_of_the_whole_model(size: int) -> None:
    for outcome in run_ranks(held, size):
        for where, places, chosen, among, before in outcome:
            assert torch.equal(places, where)
            assert torch.equal(among, (where[chosen] - 1) // 3)
            assert before.tolist() == [sum(k**2 for k in range(place)) for place in where.tolist()]


def test_places_that_are_not_the_models() -> None:
    shard_index = ShardIndex(HalfSpaces(), torch.arange(4))
    for ask in (
        lambda: shard_index.places_of(torch.arange(2), 5, World.single()),
        lambda: shard_index.among(torch.arange(2), 5, [2], World.single()),
        lambda: shard_index.before(torch.arange(5), [10], World.single()),
    ):
        with pytest.raises(RuntimeError, match="rank 0 has 5 points, and the places of 4"):
            ask()


def test_shares_of_owners() -> None:
    shares = shares_of(torch.tensor([2, 0, 2, 0, 0]), 4)
    assert [share.tolist() for share in shares] == [[1, 3, 4], [], [0, 2], []]
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="1 of 3 points are given to owners that are not among the 2 ranks"):
            shares_of(torch.tensor([0, wrong, 1]), 2)


def test_a_rank_holds_what_its_placement_gives_it() -> None:
    means = torch.randn(50, 3, generator=keyed_generator("held"))
    points = Points({"means": means.requires_grad_(), "opacities": torch.rand(50, 1)})
    for rank in range(3):
        part = HalfSpaces().hold(points, replace(World.single(), rank=rank, size=3))
        mine = HalfSpaces().owners(means.detach(), 3) == rank
        for name, value in part.params.items():
            assert torch.equal(value, points.params[name][mine]) and value.is_leaf
            assert value.requires_grad == points.params[name].requires_grad


class _Some(HalfSpaces):
    """Gives away all but one point."""

    def shares(self, count: int, positions: Callable[[], Tensor], ranks: int) -> Shares:
        return [range(0), range(count - 1)]


def test_every_point_has_an_owner() -> None:
    points = Points({"means": torch.zeros(5, 3)})
    for size in (2, 3):
        with pytest.raises(ValueError, match=rf"_Some deals 5 points out in shares of \[0, 4\]: .* {size} ranks"):
            _Some().hold(points, replace(World.single(), size=size))
