"""The tile step equals the ordinary one: autograd through the operators on one rank, torch's Adam, its counting."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cuda_ext import intersect
from cuda_ext.ops.adam import adam_scalars
from cuda_ext.ops.lazy_adam import LazyAdam
from ns_multigpu.core.assignment import TileRanges
from ns_multigpu.core.placement import Plan, Sharded
from ns_multigpu.core.tile_work import TileWork
from ns_multigpu.core.world import World
from ns_multigpu.plugin.blocks.plan_graphs import PlanGraphs
from ns_multigpu.primitives.fused_step import ORDER, padded, still
from ns_multigpu.primitives.gaussians import TILE, Gaussians
from ns_multigpu.primitives.tile_lists import SortedLists
from ns_multigpu.primitives.tile_rows import CollectiveRows, OwnRows, PeerRows, RowTransport
from ns_multigpu.primitives.tile_settings import TileSettings, bands
from ns_multigpu.primitives.tile_step import TileStep
from tests.primitives.test_fused_step import HEIGHT, LAMBDA, RATES, WIDTH, Scene, background, batch_of, ordinary
from tests.ranks import run_ranks, skip_without_gpus
from tests.strategies.scene import make_image, make_points

POINTS = 300


def sharded(
    world: World,
    batch: int,
    steps: int,
    antialiased: bool = False,
    bounds: tuple[int, ...] | None = None,
    room: tuple[int, int, int] = (1024, 1024, 4096),
    lazy: bool = False,
    transport: str = "collective",
    by_sort: bool = False,
    points: int = POINTS,
    moment: torch.dtype = torch.float32,
    selective: bool = False,
    scene: Scene = make_points,
    groups: int = 1,
    captured: bool = False,
) -> dict[str, torch.Tensor]:
    """The course of several ranks, each with its points; capacities that are too small grow on the way."""
    device = world.device
    held = Sharded(bounds).hold(scene(points, torch.float32, device), world)
    params = {k: v.detach() for k, v in held.params.items()}
    moments = {k: (torch.zeros_like(v, dtype=moment), torch.zeros_like(v, dtype=moment)) for k, v in params.items()}
    statistics = {k: torch.zeros(len(held), device=device) for k in ("grad2d", "count", "radii")}
    put_off = LazyAdam.make(len(held), device) if lazy else None
    work = TileWork()
    assignment = TileRanges(work)
    settings = TileSettings(WIDTH, HEIGHT, batch, 2, antialiased, True, LAMBDA, *room, selective, groups)

    def made() -> TileStep:
        shape = (settings.rows, settings.segment, settings.words)
        rows: RowTransport = (
            OwnRows(world, *shape)
            if transport == "own"
            else CollectiveRows(world, *shape)
            if transport == "collective"
            else PeerRows(world, *shape, atomics=transport == "atomics")
        )
        lists = SortedLists(settings, world, peer=transport != "collective") if by_sort else None
        return TileStep(params, moments, statistics, settings, world, rows, put_off, lists)

    one, losses, redone, sent = made(), [], 0, 0
    graphs = PlanGraphs(device) if captured else None
    pictures = torch.zeros(batch, HEIGHT, WIDTH, 3, dtype=torch.uint8, device=device)
    step = 0
    while step < steps:
        here = batch_of(step, batch, device)
        one.viewmats.copy_(torch.stack([v.viewmat for v in here]))
        one.Ks.copy_(torch.stack([v.K for v in here]))
        one.backgrounds.copy_(torch.stack([background(step, p) for p in range(batch)]))
        one.scalars.copy_(torch.tensor([adam_scalars(RATES[k], (0.9, 0.999), 1e-15, step + 1) for k in ORDER]))
        plan = bands(assignment.assign_alike(here, world.size), settings)
        targets = []
        for patch in plan[world.rank]:
            _, top, _, bottom = patch.rendered(here[patch.view])
            image = make_image(here[patch.view]).to(device)[top:bottom].contiguous()
            targets.append(pictures[patch.view, top:bottom].copy_(image))

        def whole(one: TileStep = one, plan: Plan = plan, targets: list[torch.Tensor] = targets) -> None:
            one.render(plan, targets)
            one.update()

        if graphs is None:
            whole()
        else:
            graphs.take(tuple(map(tuple, plan)), whole)
        status = one.status()
        if status.full:
            assert status.done == 0
            redone += 1
            wanted = [padded(n) for n in status.needed]
            more = [
                max(w, c)
                for w, c in zip(wanted, (settings.rows, settings.segment, settings.intersections), strict=True)
            ]
            settings = replace(settings, rows=more[0], segment=more[1], intersections=more[2])
            one = made()
            if graphs is not None:
                graphs.forget()
            continue
        assert status.done == 1 and torch.isfinite(one.report).all()
        counts = one.tile_counts.cpu()
        work.learn(here, counts.reshape(-1).tolist())
        losses.append(one.report[:batch].mean())
        sent += status.sent
        step += 1
    one.flush()
    result = {k: v.cpu() for k, v in params.items()} | {f"v of {k}": m[1].cpu() for k, m in moments.items()}
    return result | {k: v.cpu() for k, v in statistics.items()} | {
        "losses": torch.stack(losses).cpu(), "redone": torch.tensor(redone), "sent": torch.tensor(sent),
        "tiles": one.tile_counts.cpu(),
    }  # fmt: skip


def in_groups(world: World, batch: int, groups: int, *args: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    """A course of steps whose rows leave in groups, and the same where all leave together."""
    return [sharded(world, batch, 3, *args, **options, groups=one) for one in (groups, 1)]


def assert_same_course(outcomes: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    losses = torch.stack([o["losses"] for o in outcomes]).sum(0)
    torch.testing.assert_close(losses, expected["losses"], rtol=1e-4, atol=1e-6)
    whole = {name: torch.cat([o[name] for o in outcomes]) for name in expected if name != "losses"}
    for name in RATES:
        error = (whole[name] - expected[name]).abs()
        # Adam divides small gradients by their own size: a rounding error there moves a parameter by as much as a step.
        assert (error > 0.2 * RATES[name]).float().mean() < 1e-2, name
        right = expected[f"v of {name}"]
        assert (whole[f"v of {name}"] - right).norm() < 5e-3 * right.norm(), name
    assert torch.equal(whole["count"], expected["count"])
    assert (whole["grad2d"] - expected["grad2d"]).norm() < 1e-3 * expected["grad2d"].norm()
    torch.testing.assert_close(whole["radii"], expected["radii"], rtol=1e-6, atol=1 / max(WIDTH, HEIGHT))
    assert all(torch.equal(o["tiles"], outcomes[0]["tiles"]) for o in outcomes), "ranks know of different work"


@pytest.mark.parametrize(("ranks", "batch"), [(1, 3), (2, 1), (3, 2), (4, 1), (4, 5)])
def test_a_course_on_shards_is_the_ordinary_one(ranks: int, batch: int) -> None:
    outcomes = run_ranks(sharded, ranks, batch, 4)
    assert_same_course(outcomes, ordinary(POINTS, batch, 4, False))
    assert sum(int(o["redone"]) for o in outcomes) == 0
    assert ranks == 1 or sum(int(o["sent"]) for o in outcomes) > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_intersections_of_each_row_of_tiles_are_counted(ranks: int) -> None:
    """As they are where each row of tiles is a patch of its own. The last is cut off by the image's border."""
    assert HEIGHT % TILE
    views = batch_of(0, 3, torch.device("cpu"))
    points, kind = make_points(POINTS, torch.float32), Gaussians(sh_degree=2)
    splats = kind.splat(points, kind.cull(points, views, range(3)), views)
    rows = {name: value.detach() for name, value in splats.rows.items()}

    def met(*patch: int) -> int:
        _, row_ids = intersect(
            rows["means2d"], rows["conics"], rows["opacities"], rows["radii"], rows["depths"], splats.hits.view_ids,
            patch, TILE,
        )  # fmt: skip
        return len(row_ids)

    expected = [[met(v, 0, y, WIDTH, min(y + TILE, HEIGHT)) for y in range(0, HEIGHT, TILE)] for v in range(3)]
    assert min(expected[0]) > 0
    for outcome in run_ranks(sharded, ranks, 3, 1):
        assert outcome["tiles"].tolist() == expected


def test_rows_that_stay_where_they_are() -> None:
    room = (1024, 1024, 4096)
    outcomes = run_ranks(sharded, 1, 2, 3, False, None, room, True, "own")
    assert_same_course(outcomes, ordinary(POINTS, 2, 3, False))


def test_a_course_with_antialiasing() -> None:
    assert_same_course(run_ranks(sharded, 2, 2, 4, True), ordinary(POINTS, 2, 4, True))


@pytest.mark.parametrize("bounds", [(0, 0, 300), (0, 7, 7, 300)])
def test_a_rank_that_owns_no_points(bounds: tuple[int, ...]) -> None:
    outcomes = run_ranks(sharded, len(bounds) - 1, 1, 3, False, bounds)
    assert_same_course(outcomes, ordinary(POINTS, 1, 3, False))


@pytest.mark.parametrize("room", [(16, 1024, 4096), (1024, 16, 64)])
def test_capacities_that_are_too_small_cost_a_step_and_change_nothing(room: tuple[int, int, int]) -> None:
    outcomes = run_ranks(sharded, 2, 2, 3, False, None, room)
    assert all(int(o["redone"]) >= 1 for o in outcomes)
    assert_same_course(outcomes, ordinary(POINTS, 2, 3, False))


def test_steps_that_are_put_off_are_the_ordinary_ones() -> None:
    outcomes = run_ranks(sharded, 2, 1, 6, False, None, (1024, 1024, 4096), True)
    assert_same_course(outcomes, ordinary(POINTS, 1, 6, False))


@pytest.mark.parametrize(("ranks", "batch"), [(1, 2), (3, 2)])
def test_lists_by_a_sort_over_all_ranks_are_the_same(ranks: int, batch: int) -> None:
    room = (1024, 1024, 4096)
    one = run_ranks(sharded, ranks, batch, 3, False, None, room, False, "collective", True)
    other = run_ranks(sharded, ranks, batch, 3, False, None, room)
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


# With no points on a rank all of its groups are empty; in the last case there is too little room at first.
@pytest.mark.parametrize(
    ("ranks", "groups", "transport", "bounds", "room"),
    [
        (1, 2, "own", None, (1024, 1024, 4096)),
        (1, 3, "atomics", None, (1024, 1024, 4096)),
        (1, 7, "transfer", None, (1024, 1024, 4096)),
        (2, 3, "collective", None, (1024, 1024, 4096)),
        (3, 2, "collective", (0, 0, 290, 300), (1024, 1024, 4096)),
        (2, 3, "collective", None, (64, 16, 64)),
    ],
)
def test_rows_may_leave_in_groups(
    ranks: int, groups: int, transport: str, bounds: tuple[int, ...] | None, room: tuple[int, int, int]
) -> None:
    courses = run_ranks(in_groups, ranks, 3, groups, False, bounds, room, ranks == 2, transport)
    for grouped, together in courses:
        assert all(torch.equal(grouped[name], together[name]) for name in together)
    assert_same_course([grouped for grouped, _ in courses], ordinary(POINTS, 3, 3, False))
    assert all(int(grouped["redone"] > 0) == (room[0] == 64) for grouped, _ in courses)


def test_groups_of_lines() -> None:
    settings = TileSettings(WIDTH, HEIGHT, 3, 2, False, False, LAMBDA, 1024, 1024, 4096)
    assert settings.stops == []
    assert replace(settings, groups=4).stops == [256, 512, 768] and replace(settings, groups=3).stops == [352, 672]
    assert replace(settings, groups=3, rows=16).stops == [0, 0], "less than a warp is one group"
    with pytest.raises(ValueError, match="at least 1 group, not in 0"):
        replace(settings, groups=0)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["atomics", "transfer", "collective"])
@pytest.mark.parametrize(("ranks", "groups"), [(1, 3), (2, 3), (2, 8)])
def test_rows_may_leave_in_groups_on_gpus(ranks: int, groups: int, transport: str) -> None:
    skip_without_gpus(ranks)
    room = (8192, 8192, 65536)
    courses = run_ranks(in_groups, ranks, 3, groups, False, None, room, True, transport, False, 3000, device="cuda")
    expected = ordinary(3000, 3, 3, False)
    for way in (0, 1):
        assert_same_course([course[way] for course in courses], expected)
    for grouped, together in courses:
        assert all(torch.equal(grouped[name], together[name]) for name in ("sent", "count", "redone"))
    # Whole batches of rows that leave too late, or are not there yet, do not pass for rounding.
    for grouped, together in courses:
        torch.testing.assert_close(grouped["losses"], together["losses"], rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["own", "atomics", "transfer"])
def test_a_graph_holds_both_streams(transport: str) -> None:
    """A world of one on a GPU: the step of two streams, captured, gives what the step of one gives."""
    world = World.single("cuda:0")
    found: list[dict[str, torch.Tensor]] = []
    for groups, captured in ((1, False), (4, False), (4, True)):
        params = {k: v.detach().clone() for k, v in make_points(3000, torch.float32, world.device).params.items()}
        moments = {k: (torch.zeros_like(v), torch.zeros_like(v)) for k, v in params.items()}
        settings = TileSettings(WIDTH, HEIGHT, 3, 2, False, True, LAMBDA, 16384, 16384, 262144, groups=groups)
        shape = (settings.rows, settings.segment, settings.words)
        rows = OwnRows(world, *shape) if transport == "own" else PeerRows(world, *shape, atomics=transport == "atomics")
        one = TileStep(params, moments, {}, settings, world, rows)
        views = batch_of(0, 3, world.device)
        one.viewmats.copy_(torch.stack([v.viewmat for v in views]))
        one.Ks.copy_(torch.stack([v.K for v in views]))
        plan = bands(TileRanges(TileWork()).assign(views, 1), settings)
        targets = [make_image(view).to(world.device) for view in views]
        # Scalars of a step that changes nothing: what is captured is run once before.
        one.scalars.copy_(still(world.device))
        one.render(plan, targets)
        one.update()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                one.render(plan, targets)
                one.update()
        for step in range(3):
            one.scalars.copy_(torch.tensor([adam_scalars(RATES[k], (0.9, 0.999), 1e-15, step + 1) for k in ORDER]))
            if captured:
                graph.replay()
            else:
                one.render(plan, targets)
                one.update()
        status = one.status()
        assert status.done == 4 and status.rows > 4096 and not status.full
        found.append({k: v.cpu() for k, v in params.items()} | {"report": one.report.cpu()})
    for other in found[1:]:
        torch.testing.assert_close(other["report"], found[0]["report"], rtol=1e-5, atol=1e-6)
        for name in ORDER:
            away = (other[name] - found[0][name]).abs()
            assert (away > 0.2 * RATES[name]).float().mean() < 1e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("transport", "lazy", "groups"), [("transfer", True, 1), ("atomics", False, 1), ("atomics", True, 3)]
)
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 1), (2, 3), (4, 2)])
def test_a_course_of_graphs_on_gpus(ranks: int, batch: int, transport: str, lazy: bool, groups: int) -> None:
    skip_without_gpus(ranks)
    options = (ranks, batch, 12, False, None, (1024, 1024, 8192), lazy, transport, False, 3000, torch.float32, False)
    outcomes = run_ranks(sharded, *options, make_points, groups, True, device="cuda")
    assert all(outcome["redone"] > 0 for outcome in outcomes), "capacities must have changed under the graphs"
    assert_same_course(outcomes, ordinary(3000, batch, 12, False))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("transport", "by_sort", "lazy"),
    [("collective", False, True), ("transfer", False, False), ("atomics", True, True), ("atomics", False, False)],
)
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 1), (2, 3), (4, 1), (4, 4)])
def test_a_course_on_gpus(ranks: int, batch: int, lazy: bool, transport: str, by_sort: bool) -> None:
    skip_without_gpus(ranks)
    room = (8192, 8192, 65536)
    outcomes = run_ranks(sharded, ranks, batch, 4, False, None, room, lazy, transport, by_sort, 3000, device="cuda")
    assert_same_course(outcomes, ordinary(3000, batch, 4, False))
