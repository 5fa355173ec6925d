"""The assignment of patches: they cover views, ranks have equally many, each goes where its points are, plans are made
ahead and the rule serves where one is late."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import TILE, View
from ns_multigpu.locality.assign import Assigner
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.locality.patches import LocalPatches, cuts, patches_of
from ns_multigpu.locality.rules import Access

SIZES = [(200, 120), (64, 64), (15, 17), (33, 1000), (1, 1), (16, 16)]


def view_of(size: tuple[int, int], index: int = 0) -> View:
    return View(torch.eye(4), torch.eye(3), *size, index)


def world_of(ranks: int, machines: int) -> World:
    """Return the first rank of so many, as far as an assignment asks."""
    return replace(World.single(), size=ranks, local_size=ranks // machines)


def assignment(ranks: int, machines: int, **options: object) -> tuple[LocalPatches, Access]:
    chosen = LocalityOptions(**{"plans": "at-once", **options})  # type: ignore[arg-type]
    access = Access(chosen.patches**2, ranks)
    return LocalPatches(world_of(ranks, machines), chosen, access), access


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("factor", [1, 2, 3, 8])
def test_patches_cover_a_view_once_and_are_cut_at_tiles(size: tuple[int, int], factor: int) -> None:
    view = view_of(size)
    covered = torch.zeros(size[1], size[0], dtype=torch.int32)
    numbers: list[int] = []
    for number, patch in patches_of(view, 3, factor):
        covered[patch.y0 : patch.y1, patch.x0 : patch.x1] += 1
        numbers.append(number)
        assert patch.view == 3 and patch.x0 % TILE == patch.y0 % TILE == 0 and patch.x1 > patch.x0
    assert bool((covered == 1).all())
    assert sorted(set(numbers)) == numbers and numbers[-1] < factor**2
    sides = [-(-side // TILE) for side in size]
    assert len(numbers) == min(factor, sides[0]) * min(factor, sides[1])
    if len(numbers) == 1:
        assert patches_of(view, 3, factor)[0][1].halo == 0, "a whole view needs none"


def test_cuts_are_even() -> None:
    assert cuts(200, 4) == [0, 48, 96, 144, 200] and cuts(100, 1) == [0, 100] and cuts(20, 8) == [0, 16, 20]


@pytest.mark.parametrize(("ranks", "machines"), [(2, 1), (4, 2), (3, 3), (6, 2)])
@pytest.mark.parametrize("known", [True, False])
def test_ranks_have_equal_patches_within_the_pixel_bound(ranks: int, machines: int, known: bool) -> None:
    made, access = assignment(ranks, machines)
    views = [view_of((200, 120), index) for index in range(3)]
    if known:
        access.record(range(3), np.random.default_rng(1).integers(0, 99, (3 * 16, ranks)).astype(np.float64))
    plan = made.assign(views, ranks)
    held = [len(patches) for patches in plan.drawn]
    assert sum(held) == 48 and max(held) - min(held) <= 1
    halo, capacity = TILE, made.most_pixels(3, 200, 120, ranks, TILE)
    for patches in plan.drawn:
        grown = [replace(patch, halo=halo).rendered(views[patch.view]) for patch in patches]
        assert sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in grown) <= capacity
    assert made.counts(3, 200, 120) == 48 and made.assign(views, ranks) == plan, "the same on every rank"


def everything_at(rank: int) -> np.ndarray:
    needed = np.ones((16, 2))
    needed[:, rank] = 1000
    return needed


@pytest.mark.parametrize("machines", [1, 2])
def test_patches_are_assigned_to_owners_of_points(machines: int) -> None:
    made, access = assignment(2, machines)
    views = [view_of((64, 64), 5), view_of((64, 64), 9)]
    access.record([5], everything_at(1))
    access.record([9], everything_at(0))
    plan = made.assign(views, 2)
    assert {patch.view for patch in plan.drawn[1]} == {0} and {patch.view for patch in plan.drawn[0]} == {1}
    # What was needed in the last step is what counts in the next.
    table = np.concatenate([everything_at(0), everything_at(1)])
    made.learn(views, table.T.astype(int).reshape(-1).tolist())
    plan = made.assign(views, 2)
    assert {patch.view for patch in plan.drawn[0]} == {0} and {patch.view for patch in plan.drawn[1]} == {1}


def test_single_rank_draws_complete_views() -> None:
    made, _ = assignment(1, 1)
    plan = made.assign([view_of((200, 120))], 1)
    assert len(plan.drawn[0]) == 1 and plan.drawn[0][0].halo == 0 and made.counts(1, 200, 120) == 1


def test_autograd_statistics_equal_those_of_steps() -> None:
    by_step, known = assignment(2, 2)
    through_autograd, also = assignment(2, 2)
    views = [view_of((40, 64), 7)]
    plan = by_step.assign(views, 2)
    table = np.random.default_rng(2).integers(0, 50, (2, len(plan.patches())))
    by_step.learn(views, table.reshape(-1).tolist())
    through_autograd.record(views, plan, table.tolist())
    first, second = known.of(7), also.of(7)
    assert first is not None and second is not None and np.array_equal(first, second)
    rows = first.reshape(4, 4, 2)
    assert np.array_equal(rows[:, :3].reshape(-1, 2), table.T) and not rows[:, 3].any(), "three columns of tiles"
    figures = through_autograd.figures()
    drawers = {patch: rank for rank, patches in enumerate(plan.drawn) for patch in patches}
    sent = sum(table[1 - drawers[patch]][k] for k, patch in enumerate(plan.patches()))
    assert figures["splats_sent"] == figures["splats_between_machines"] == sent
    assert through_autograd.figures() == {}, "means since it was asked last"


def test_plan_for_another_resolution_is_not_used() -> None:
    """The plan was prefetched before the resolution changed: views are the same, patches are not."""
    made, access = assignment(2, 2, plans="ahead")
    access.record(range(2), np.random.default_rng(3).integers(0, 99, (32, 2)).astype(np.float64))
    small, large = ([view_of(size, 0), view_of(size, 1)] for size in ((16, 16), (64, 64)))
    made.prefetch_plans([small, large])
    assert made.assign_alike(large, 2).patches() == made.assign(large, 2).patches()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"patches": 0}, "patches 0"), ({"patches": 9}, "1 to 8"), ({"group_size": 7}, "group-size 7"),
     ({"place_again_at": 1.0}, "above 1")],
)  # fmt: skip
def test_options_out_of_range_are_named(options: dict[str, float], words: str) -> None:
    assert words in (LocalityOptions(**options).problem() or "")  # type: ignore[arg-type]
    assert LocalityOptions().problem() is None


def test_plan_missing_on_another_rank_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made, access = assignment(2, 2, plans="ahead")
    access.record(range(2), np.random.default_rng(3).integers(0, 99, (32, 2)).astype(np.float64))
    batch = [view_of((64, 64), 0), view_of((64, 64), 1)]
    others = -1  # what the other rank is ready through
    monkeypatch.setattr("ns_multigpu.locality.patches.all_gather_ints", lambda mine, _: [mine, [others]])
    made.prefetch_plans([batch])
    assert made._planner is not None
    while made._planner.ready_through() < 0:
        pass
    made.prefetch_plans([])
    made.assign_alike(batch, 2)
    assert made.figures()["plan_misses"] == 1


def test_assignments_recur_in_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch gets an earlier one's assignment if that is nearly as level; a resumed run goes on alike."""
    made, access = assignment(2, 1)
    access.record(range(3), np.random.default_rng(3).integers(900, 1000, (48, 2)).astype(np.float64))
    views = [view_of((64, 64), k) for k in range(4)]
    first = made.assign_alike(views[:2], 2)
    assert made.assign_alike(views[1:3], 2) == first != made.assign(views[1:3], 2)
    numbers = [4 * (patch.y0 // 16) + patch.x0 // 16 for patch in first.drawn[0] if patch.view == 0]
    access.record([3], np.array([[900.0 if k in numbers else 1.0] * 2 for k in range(16)]))
    uneven = [views[3], views[0]]  # the first rank would draw all of a view
    assert made.assign_alike(uneven, 2) == made.assign(uneven, 2) != first
    found = made.assign_alike(views[:2], 2)
    monkeypatch.setattr(Assigner, "assign", None)  # nothing is searched for where a kept assignment is level enough
    assert made.assign_alike(views[:2], 2) == found and made.assign_alike(uneven, 2) != first
    resumed = assignment(2, 1)[0]
    resumed._access = access
    resumed.load_state(made.state())
    assert len(made.state()) == 2 and resumed.assign_alike(views[:2], 2) == found
