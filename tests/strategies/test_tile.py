"""Properties of `tile`: given ranges of points, one view drawn by all ranks, moving cuts, exchanged rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ns_multigpu.core.assign.assignment import TileRanges
from ns_multigpu.core.assign.placement import Sharded, even_bounds
from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Points
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies.tile import tile
from tests.lib.overlaps import overlaps
from tests.lib.ranks import run_ranks
from tests.strategies.scene import make_points, make_views
from tests.strategies.test_law import check, one_step, take_step

POINTS = 120
BOUNDS = {2: (0, 120, 120), 3: (0, 0, 100, 120), 4: (0, 7, 7, 7, 120)}
CASES = ("gaussians", "gaussians, antialiased, absgrad")


def steps(world: World) -> dict[str, Any]:
    """Two steps on one view and two on three, by ranks of which some own nothing; the second of each with new cuts."""
    out: dict[str, Any] = {}
    for kind in CASES:
        for views in (1, 3):
            spread = replace(tile(world), placement=Sharded(BOUNDS[world.size]))
            assert isinstance(spread.assignment, TileRanges)
            spread.assignment.work.empty = 1  # so few splats would not move a cut
            plans: list[Any] = []
            for turn in range(3):
                plans.append(spread.plan(make_views(views, torch.float64)))
                if turn < 2:
                    out[f"{kind}, {views}, {turn}"] = take_step(spread, kind, views, POINTS, torch.float64)
            out[f"plans {kind}, {views}"] = plans
    return out


@pytest.mark.parametrize("size", [2, 3])
def test_uneven_ranges_and_cuts_that_move(size: int) -> None:
    outcomes = run_ranks(steps, size)
    for kind in CASES:
        for views in (1, 3):
            expected = one_step(World.single(), "single", kind, views, POINTS, torch.float64)
            for turn in (0, 1):
                check([outcome[f"{kind}, {views}, {turn}"] for outcome in outcomes], expected, torch.float64)
            by_rank = [outcome[f"plans {kind}, {views}"] for outcome in outcomes]
            assert all(plans == by_rank[0] for plans in by_rank)
            before, after, then = by_rank[0]
            assert after == then, "the same view is cut in the same way once it is known"
            if views == 3:
                assert before != after, "the scene must be one whose work is not spread as its area"


def is_exchanged(world: World) -> dict[str, Any]:
    """Return the received rows, all ranks' own rows, and the bytes sent in both directions."""
    spread = tile(world)
    views = make_views(4, torch.float32)[:3]
    held = spread.placement.hold(make_points(90, torch.float32), world)
    plan = spread.plan(views)
    primitive = Gaussians(sh_degree=1, absgrad=True)
    own = primitive.splat(held, primitive.cull(held, views, [0, 1, 2]), views)
    world.traffic.since("step")
    splats = spread.rows.exchange(own, held, views, plan, world)
    there = world.traffic.since("step")
    assert splats.probe is not None and own.probe is not None
    weight = 1.0 + world.rank
    (sum(row.sum() for row in splats.rows.values() if row.requires_grad) * weight + splats.probe.sum()).backward()
    back = world.traffic.since("step")
    with torch.no_grad():
        known = spread.plan(views)
        moved = [replace(view, viewmat=views[0].viewmat) for view in views]
        again = spread.render(primitive, held, moved, plan)
    mine = {"hits": own.hits, "rows": {k: row.detach() for k, row in own.rows.items()}}
    return {
        "own": all_gather_objects(mine, world),
        "hits": splats.hits,
        "rows": {k: row.detach() for k, row in splats.rows.items()},
        "touch": torch.stack([overlaps(own, views, patches) for patches in plan.drawn]),
        "probe": own.probe.grad,
        "bytes": (there, back),
        "plans": (known, spread.plan(views)),
        "pixels": sum(pixels.color.numel() for pixels in again.pixels),
    }


@pytest.mark.parametrize("size", [1, 3])
def test_rows_are_received_once_in_order_by_overlapped_patches(size: int) -> None:
    outcomes = run_ranks(is_exchanged, size)
    firsts = even_bounds(90, size)
    total = 0
    for rank, outcome in enumerate(outcomes):
        wanted: list[tuple[int, int, int, int]] = []  # view, global id, owner, row
        for owner, splats in enumerate(outcome["own"]):
            touch = outcomes[owner]["touch"][rank]
            for row in touch.nonzero().flatten().tolist():
                hits = splats["hits"]
                wanted.append((int(hits.view_ids[row]), firsts[owner] + int(hits.point_ids[row]), owner, row))
        wanted.sort()
        hits = outcome["hits"]
        assert list(zip(hits.view_ids.tolist(), hits.point_ids.tolist(), strict=True)) == [w[:2] for w in wanted]
        assert hits.view_ids.dtype == hits.point_ids.dtype == torch.int32
        for name, rows in outcome["rows"].items():
            for k, (_, _, owner, row) in enumerate(wanted):
                assert torch.equal(rows[k], outcome["own"][owner]["rows"][name][row]), name
            assert rows.is_contiguous()
        # The probe's gradient is one from each rank that the row went to.
        assert torch.equal(outcome["probe"], outcome["touch"].sum(0)[:, None].expand(-1, 2).float())
        sent = sum(int(outcome["touch"][other].sum()) for other in range(size) if other != rank)
        kept = sum(1 for _, _, owner, _ in wanted if owner != rank)
        # Sent: mean, conic, opacity, colour, depth; radii, id, view; and a count to each rank. Returned: gradients of
        # the former and of the probe.
        assert outcome["bytes"] == (sent * 4 * (10 + 4) + 8 * (size - 1), kept * 4 * (10 + 2))
        assert outcome["plans"][0] == outcome["plans"][1], "rendering without gradients moves the cuts of training"
        total += sent
    assert sum(outcome["pixels"] for outcome in outcomes) >= sum(
        3 * view.width * view.height for view in make_views(4, torch.float32)[:3]
    )
    assert (total > 0) == (size > 1)
    assert size == 1 or any(not bool(outcome["touch"].all(0).any()) for outcome in outcomes), "all rows go everywhere"


def test_the_range_that_a_rank_holds() -> None:
    points = make_points(5, torch.float64)
    assert even_bounds(5, 3) == (0, 1, 3, 5) and even_bounds(0, 2) == (0, 0, 0) and even_bounds(1, 2) == (0, 0, 1)
    held = Sharded((0, 5)).hold(points, World.single())
    assert all(torch.equal(held.params[name], points.params[name]) for name in points.params)
    assert all(param.is_leaf and param.requires_grad for param in held.params.values())
    assert held.params["means"] is not points.params["means"]
    frozen = Points({"means": torch.zeros(2, 3)})
    assert not Sharded().hold(frozen, World.single()).params["means"].requires_grad
    for bounds in [(0, 4), (0, 2, 5), (1, 5), (5, 0)]:
        with pytest.raises(ValueError, match=r"do not deal 5 points out to 1 ranks: give 2 ascending numbers"):
            Sharded(bounds).hold(points, World.single())
