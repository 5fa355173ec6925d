"""The placement by visibility: machines by views, balanced GPUs, kept between refinements, made again when due."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ns_multigpu.core.assign.placement import NewPoints
from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import FAR, View
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.locality.placing import ByViews
from ns_multigpu.locality.rules import Access
from tests.lib.ranks import run_ranks
from tests.strategies.test_law import on_machines

POINTS, VIEWS = 4096, 12


def towns(points: int = POINTS) -> torch.Tensor:
    """Two towns far apart, their points mixed."""
    generator = torch.Generator().manual_seed(4)
    where = torch.rand(points, 3, generator=generator) - 0.5
    where[:, 0] += torch.where(torch.arange(points) % 2 == 0, -50.0, 50.0)
    return where


def above(index: int, x: float, height: float = 2.0) -> View:
    """From above a town, down on all of it."""
    pose = torch.eye(4)
    pose[:3, :3] = torch.tensor([[1.0, 0, 0], [0, -1, 0], [0, 0, -1]])
    pose[:3, 3] = -pose[:3, :3] @ torch.tensor([x, 0.0, height])
    K = torch.tensor([[240.0, 0, 128], [0, 240, 128], [0, 0, 1]])
    return View(pose, K, 256, 256, index)


def views() -> list[View]:
    """Of one town, then of the other, in turns."""
    return [above(index, -50.0 if index % 2 == 0 else 50.0) for index in range(VIEWS)]


def placement(world: World, seen: list[View] | None = None, **options: Any) -> tuple[ByViews, Access]:
    chosen = LocalityOptions(**options)
    access = Access(chosen.patches**2, world.size)
    made = ByViews(world, chosen, access)
    if seen is not None:
        made.look(lambda: seen)
    return made, access


def alone(ranks: int, machines: int) -> World:
    """Return a world that pretends to be rank 0 of several, for a placement, without the other ranks."""
    return replace(World.single(), size=ranks, local_size=ranks // machines)


def owners_of(made: ByViews, where: torch.Tensor, ranks: int) -> torch.Tensor:
    owners = torch.full((len(where),), -1)
    for rank, share in enumerate(made.shares(len(where), lambda: where, ranks)):
        owners[share] = rank
    return owners


def test_each_machine_has_the_town_that_its_views_see() -> None:
    where = towns()
    made, access = placement(alone(4, 2), views())
    owners = owners_of(made, where, 4)
    first, second = owners[where[:, 0] < 0] // 2, owners[where[:, 0] > 0] // 2
    assert len(set(first.tolist())) == len(set(second.tolist())) == 1 and first[0] != second[0]
    counts = torch.bincount(owners, minlength=4)
    assert counts.max() < 1.2 * counts.float().mean(), "level on each machine's ranks"
    assert (
        made.group_owners is not None
        and made.group_owners.view_machines.tolist() == [int(first[0]), int(second[0])] * 6
    )
    needed = access.of(0)
    assert needed is not None and needed[:, 2 * int(second[0])].sum() == 0, "nothing from the other machine"
    assert POINTS / 2 <= needed.sum() <= 1.5 * POINTS, "all of the town; what is in two halos counts twice"
    level = needed[:, 2 * int(first[0]) : 2 * int(first[0]) + 2].sum(0)
    assert level.max() < 1.2 * level.mean(), "in a single view, too"


def test_what_lies_beyond_the_far_plane_is_not_needed() -> None:
    """Views from above, of which every second is too high to see its town."""
    seen = [above(index, -50.0 if index % 2 == 0 else 50.0, 2.0 if index % 2 == 0 else 9.0) for index in range(VIEWS)]
    for far, shows in ((FAR, True), (5.0, False)):
        made, access = placement(alone(4, 2))
        made.look(lambda: seen, far)
        owners_of(made, towns(), 4)
        low, high = access.of(0), access.of(1)
        assert low is not None and high is not None and low.sum() > POINTS / 3
        assert (high.sum() > POINTS / 3) == shows


def place(world: World, made: ByViews, where: torch.Tensor, threshold: float = 1.1) -> Any:
    work = torch.ones(len(where), dtype=torch.int64)
    keys = torch.arange(len(where))
    works = [sum(parts) for parts in zip(*all_gather_objects([len(where)], world), strict=True)]
    return made.place(NewPoints(keys, lambda: where, work, works, threshold), world)


def test_owners_are_kept_until_the_model_has_grown() -> None:
    world, where = alone(4, 2), towns()
    made, _ = placement(world, views(), place_again_at=2.0)
    owners = owners_of(made, where, 4)
    group_owners = made.group_owners
    placed = place(world, made, where)
    assert not placed.redistributed and torch.equal(placed.owners, owners) and made.group_owners is group_owners
    twice = torch.cat([where, where[: POINTS // 2] + 0.001])
    placed = place(world, made, twice)
    assert not placed.redistributed and torch.equal(placed.owners[:POINTS], owners), "neighbours stay with neighbours"
    more = torch.cat([where, where + 0.001, where + 0.002])
    placed = place(world, made, more)
    assert (
        placed.redistributed
        and made.group_owners is not group_owners
        and made.group_owners is not None
        and made.group_owners.points == 3 * POINTS
    )


def test_points_are_placed_again_when_a_rank_has_too_many() -> None:
    world, where = alone(4, 2), towns()
    made, _ = placement(world, views())
    owners_of(made, where, 4)
    group_owners = made.group_owners
    heap = torch.cat([where, where[:1].expand(POINTS // 3, 3) + 0.02 * torch.randn(POINTS // 3, 3)])
    placed = place(world, made, heap)
    assert placed.redistributed and made.group_owners is not group_owners
    counts = torch.bincount(placed.owners, minlength=4)
    assert counts.max() < 1.3 * counts.float().mean()


def test_placement_that_cannot_balance_is_not_retried() -> None:
    """Four groups on three ranks: one has twice as many points as the others."""
    world, where = alone(3, 3), towns()
    made, _ = placement(world, views(), group_size=1024)
    owners = owners_of(made, where, 3)
    assert sorted(torch.bincount(owners).tolist()) == [1024, 1024, 2048]
    group_owners = made.group_owners
    assert not place(world, made, where).redistributed and made.group_owners is group_owners
    again, _ = placement(world, views(), group_size=1024)
    again.load_state(made.state())
    assert not place(world, again, where).redistributed, "nor after a resume"


def test_state_dict_is_sufficient() -> None:
    where = towns()
    made, access = placement(alone(4, 2), views())
    owners = owners_of(made, where, 4)
    other, also = placement(alone(4, 2), views())
    other.load_state(made.state())
    assert torch.equal(place(alone(4, 2), other, where).owners, owners) and other.kind == made.kind == "ByViews 2x2"
    for view in range(VIEWS):
        mine, its = access.of(view), also.of(view)
        assert mine is not None and its is not None and np.array_equal(mine, its)
    cut_otherwise, nothing = placement(alone(4, 2), views(), patches=2)
    cut_otherwise.load_state(made.state())
    assert torch.equal(place(alone(4, 2), cut_otherwise, where).owners, owners) and nothing.of(0) is None


@pytest.mark.parametrize("points", [0, 1, 3, 5, 40])
@pytest.mark.parametrize("seen", [None, "towns", "away"])
def test_tiny_models_and_views_that_show_nothing(points: int, seen: str | None) -> None:
    where = towns(max(points, 1))[:points]
    looks = {None: None, "towns": views(), "away": [above(0, 1e4)]}[seen]
    made, _ = placement(alone(4, 2), looks)
    owners = owners_of(made, where, 4)
    assert bool(((owners >= 0) & (owners < 4)).all())
    remarks = made.remarks()
    assert bool(remarks) == (points > 0 and seen is not None and (points < 4 or seen == "away"))
    assert made.remarks() == [], "said once"
    assert len(place(alone(4, 2), made, where).owners) == points


def test_nonfinite_and_far_positions_do_not_affect_others() -> None:
    where = towns()
    odd = torch.tensor([[torch.nan, 0, 0], [torch.inf, 1, 1], [1e9, 0, 0], [-1e9, 0, 0]])
    made, _ = placement(alone(4, 2), views())
    owners = owners_of(made, torch.cat([where, odd]), 4)
    machines = torch.bincount(owners[:POINTS][where[:, 0] < 0] // 2, minlength=2)
    assert machines.min() <= 32, "the cube is around the others: one group at most lies in both towns"


def test_a_large_model_is_placed_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ns_multigpu.locality.placing.MOST_SAMPLED", 1000)
    where = towns()
    made, access = placement(alone(4, 2), views())
    owners = owners_of(made, where, 4)
    machines = torch.bincount(owners[where[:, 0] < 0] // 2, minlength=2)
    assert machines.min() <= 32, "one group at most lies in both towns"
    needed = access.of(0)
    assert needed is not None and 0.9 * POINTS / 2 < needed.sum() < 1.5 * POINTS, "a point of the sample stands for all"


def placed(machines: int, world: World) -> list[Any]:
    """Return the placements that each rank computes of a replicated model, and of its shard."""
    world = on_machines(world, machines)
    where = towns()
    made, access = placement(world, views())
    shares = [share.tolist() for share in made.shares(len(where), lambda: where, world.size)]
    mine = where[shares[world.rank]]
    grown = torch.cat([mine, mine + 0.001])
    placed = place(world, made, grown)
    assert made.group_owners is not None
    return [
        shares,
        placed.redistributed,
        made.group_owners.starts.tolist(),
        made.group_owners.owners.tolist(),
        access.state()[1].tolist(),
    ]


def test_all_ranks_find_the_same() -> None:
    found = run_ranks(partial(placed, 3), 3)
    assert found[0] == found[1] == found[2] and found[0][1]
    assert sorted(place for share in found[0][0] for place in share) == list(range(POINTS))


def broken(world: World) -> str:
    made, _ = placement(world, views())

    def fails(*_: Any) -> Any:
        raise ValueError("the sample is no good")

    made._placed = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no good") as error:
        made.shares(10, lambda: towns(10), world.size)
    return str(error.value)


def test_failure_on_rank_zero_is_raised_on_all_ranks() -> None:
    assert run_ranks(broken, 2) == ["the sample is no good"] * 2


def test_other_ranks_than_its_own_are_refused() -> None:
    made, _ = placement(alone(4, 2), views())
    with pytest.raises(ValueError, match="4 ranks of this run, not on 3"):
        made.shares(10, lambda: towns(10), 3)


def test_images_of_views_that_see_no_point_are_spread_over_machines() -> None:
    seen = [*views(), *(above(VIEWS + k, 1e4) for k in range(4))]
    made, access = placement(alone(4, 2), seen)
    owners_of(made, towns(), 4)
    assert sorted(made.view_owners[-4:]) == [0, 0, 1, 1]
    assert made.remarks() == ["4 of 16 training views show none of the points that were looked at."]
    blank = access.of(VIEWS)
    assert blank is not None and blank.sum() == 0
