"""A step that reads nothing back equals the ordinary one: autograd through the operators on one rank, torch's Adam, its
counting. On replicas and on shards, as launched and captured."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cuda_ext import intersect
from cuda_ext.ops.optim.lazy_adam import LazyAdam
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange import replicated_rows
from ns_multigpu.core.step.step import scalars_of_no_step
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.types import TILE, Patch
from ns_multigpu.primitives.gaussians.functions import Gaussians
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.primitives.training_runs import (
    HEIGHT,
    LAMBDA,
    RATES,
    WIDTH,
    Outcome,
    TrainingRun,
    assert_same_run,
    batch_of,
    ordinary,
    scalars,
    step_of,
    take,
    taken,
    together,
)
from tests.strategies.scene import make_image, make_points

CAPACITIES, LARGE_CAPACITIES = (1024, 1024, 4096), (8192, 8192, 65536)


# Of replicas each draws as many views.
@pytest.mark.parametrize(
    ("strategy", "ranks", "batch", "antialiased"),
    [
        ("batch", 1, 3, True), ("batch", 2, 2, False), ("tile", 1, 3, False), ("tile", 2, 2, True),
        ("tile", 3, 1, False),
    ],
)  # fmt: skip
def test_fused_run_equals_the_autograd_run(strategy: str, ranks: int, batch: int, antialiased: bool) -> None:
    run = TrainingRun(strategy, batch, 4, antialiased, capacities=CAPACITIES if strategy == "tile" else None)
    outcomes = take(run, ranks)
    assert_same_run(run, outcomes, ordinary(run))
    assert sum(int(o["redone"]) for o in outcomes) == 0
    assert (sum(int(o["sent"]) for o in outcomes) > 0) == (strategy == "tile" and ranks > 1)


@pytest.mark.parametrize("strategy", ["batch", "tile"])
def test_run_with_tall_views(strategy: str) -> None:
    """Counts use the longer side of a view, not its width."""
    run = TrainingRun(strategy, 2, 2, size=(30, 60))
    found, expected = taken(World.single(), run), ordinary(run)
    assert_same_run(run, [found], expected)
    assert (found["radii"] - expected["radii"]).abs().max() < 1e-2


def test_intersections_of_each_row_of_tiles_are_counted() -> None:
    """As they are where each row of tiles is a patch of its own. The last is cut off by the image's border."""
    assert HEIGHT % TILE
    run = TrainingRun("tile", 3, 1, capacities=CAPACITIES)
    views = batch_of(0, 3, torch.device("cpu"))
    points, kind = make_points(run.points, torch.float32), Gaussians(sh_degree=2)
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
    for outcome in take(run, 2):
        assert outcome["tiles"].view(3, -1).tolist() == expected


def test_run_with_local_rows() -> None:
    run = TrainingRun("tile", 2, 3, capacities=CAPACITIES, lazy=True, transport="own")
    assert_same_run(run, take(run, 1), ordinary(run))


def test_a_rank_that_owns_no_points() -> None:
    run = TrainingRun("tile", 1, 3, bounds=(0, 7, 7, 300), capacities=CAPACITIES)
    assert_same_run(run, take(run, 3), ordinary(run))


@pytest.mark.parametrize(
    ("strategy", "capacities"),
    [("batch", (64, 1024, 128)), ("tile", (16, 1024, 4096)), ("tile", (1024, 16, 64))],
)
def test_a_capacity_that_is_too_small_costs_a_step_and_changes_nothing(
    strategy: str, capacities: tuple[int, int, int]
) -> None:
    run = TrainingRun(strategy, 2, 3, capacities=capacities)
    outcomes = take(run, 2)
    assert all(int(o["redone"]) >= 1 for o in outcomes)
    assert_same_run(run, outcomes, ordinary(run))


# ---- deferred steps ----


def assert_same_steps(run: TrainingRun, lazy: list[Outcome], eager: list[Outcome]) -> None:
    """Assert that both are closer to each other than to the ordinary run, whose sums have another order."""
    one, other = together(run, lazy), together(run, eager)
    for name, rate in RATES.items():
        assert float((one[name] - other[name]).abs().mean()) < 2e-3 * rate, name


@pytest.mark.parametrize("strategy", ["batch", "tile"])
def test_deferred_steps_equal_ordinary_steps(strategy: str) -> None:
    run = TrainingRun(strategy, 2 if strategy == "batch" else 1, 8, lazy=True)
    lazy = take(run, 2)
    assert_same_steps(run, lazy, take(replace(run, lazy=False), 2))
    assert_same_run(run, lazy, ordinary(run))


@pytest.mark.parametrize("strategy", ["batch", "tile"])
def test_capacity_exceeded_while_steps_are_deferred(strategy: str) -> None:
    run = TrainingRun(strategy, 2 if strategy == "batch" else 1, 8, lazy=True)
    plenty = take(run, 2)
    rows, segment, intersections = plenty[0]["first"].tolist()
    tight = take(replace(run, capacities=(rows, max(segment, 1), intersections)), 2)
    assert int(tight[0]["redone"]) >= 1 and int(tight[0]["deferred"]) >= 1
    for name in RATES:
        assert all(torch.equal(a[name], b[name]) for a, b in zip(tight, plenty, strict=True)), name


def test_lazy_step_flushes_after_64_deferred_steps() -> None:
    world = World.single(torch.device("cpu"))
    params = {k: v.detach() for k, v in make_points(20, torch.float32, "cpu").params.items()}
    settings = StepSettings(16, 16, 1, LAMBDA, 32, 1, 128)
    one = step_of(world, "single", params, settings, lazy=LazyAdam.make(20, "cpu"))
    view = replace(batch_of(0, 1, torch.device("cpu"))[0], width=16, height=16)
    one.viewmats[0], one.Ks[0] = view.viewmat, view.K
    plan, targets = Plan.of([[Patch.whole(0, view)]]), [torch.zeros(16, 16, 3, dtype=torch.uint8)]
    for k in range(67):
        one.scalars.copy_(scalars(k + 1))
        one.take(plan, targets)
    status = one.status()
    assert (status.done, status.full) == (64, True) and status.rows <= 32
    one.flush()
    one.take(plan, targets)
    assert (one.status().done, one.status().full) == (1, False)


# ---- exchanged rows ----


def test_bytes_sent_by_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is sent, before anybody is met: no gradient of a colour that was clamped at black, whose sign the others
    cannot see; and views by their number in the batch."""
    params = {k: v.detach() for k, v in make_points(200, torch.float32, "cpu").params.items()}
    params["features_dc"] = params["features_dc"] - 2.0  # dark: some colours are clamped
    settings = StepSettings(WIDTH, HEIGHT, 1, LAMBDA, 512, 1, 1 << 14)
    view = batch_of(0, 1, torch.device("cpu"))[0]
    here = World.single(torch.device("cpu"))
    alone = step_of(here, "single", params, settings)
    group: Any = object()
    second = World(1, 2, 1, 2, here.device, group, group, group)
    sender = step_of(second, "batch", params, replace(settings, views=2))
    for one in (alone, sender):
        one.viewmats[:], one.Ks[:] = view.viewmat, view.K
        one.scalars.copy_(scalars_of_no_step(len(ORDER), here.device))
    left: list[list[torch.Tensor]] = []
    monkeypatch.setattr(replicated_rows, "all_gather_together", lambda everyone, mine, world: left.append(mine))
    alone.take(Plan.of([[Patch.whole(0, view)]]), [make_image(view)])
    next(sender.parts(Plan.of([[Patch.whole(0, view)], [Patch.whole(1, view)]]), [make_image(view)])).launch()
    ((message, view_ids, point_ids, radii, conics, records),) = left
    rows = sender._kernels.project(sender._model, sender._cameras(range(1, 2), sender.views()), settings.rows)
    count = int(rows.count)
    clamped = rows.features[:count] <= 0
    sent, made = records[:count], 0.5 * alone._transport._table[:count]  # of the mean over two views
    assert 0.1 < clamped.float().mean() < 0.9
    assert (made[:, 6:9][clamped] != 0).any() and (sent[:, 6:9][clamped] == 0).all()
    assert torch.equal(sent[:, 6:9][~clamped], made[:, 6:9][~clamped])
    assert torch.equal(sent[:, :6], made[:, :6]) and torch.equal(sent[:, 9:12], made[:, 9:12])
    looked = alone.status()
    assert message.tolist() == [looked.rows, 0, looked.intersections, 0] and message[0] == looked.rows == count
    assert (view_ids[:count] == 1).all()
    for copied, own in ((point_ids, rows.point_ids), (radii, rows.radii), (conics, rows.conics)):
        assert torch.equal(copied[:count], own[:count])


def test_lists_by_a_sort_over_all_ranks_are_the_same() -> None:
    run = TrainingRun("tile", 2, 3, capacities=CAPACITIES)
    for a, b in zip(take(replace(run, by_sort=True), 3), take(run, 3), strict=True):
        # Sorted lists need each row's line at its owner: one more word per row.
        assert [name for name in a if not torch.equal(a[name], b[name])] == ["bytes"]


# ---- captured ----


@pytest.mark.parametrize(("strategy", "ranks"), [("tile", 2), ("batch", 1), ("batch", 2)])
def test_run_of_captured_graphs(strategy: str, ranks: int) -> None:
    run = TrainingRun(
        strategy, 2, 12, capacities=(64, 16, 64), lazy=True, transport="collective", captured=True
    )  # fmt: skip
    outcomes = take(run, ranks)
    assert all(int(o["redone"]) > 0 for o in outcomes), "capacities must have changed under the graphs"
    assert all(int(o["replayed"]) > 4 for o in outcomes), "hardly a step came from what was recorded"
    assert_same_run(run, outcomes, ordinary(run))


# ---- on GPUs ----


@pytest.mark.gpu
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("ranks", "batch", "antialiased"), [(1, 1, False), (1, 3, True), (2, 2, False), (4, 8, True)])
def test_run_of_replicas_on_gpus(ranks: int, batch: int, antialiased: bool, lazy: bool) -> None:
    run = TrainingRun("batch", batch, 4, antialiased, lazy=lazy, points=3000)
    assert_same_run(run, take(run, ranks, "cuda"), ordinary(run))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("transport", "by_sort", "lazy"),
    [("collective", False, True), ("peer", True, True), ("peer", False, False)],
)
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 1), (2, 3), (4, 1), (4, 4)])
def test_run_of_shards_on_gpus(ranks: int, batch: int, lazy: bool, transport: str, by_sort: bool) -> None:
    run = TrainingRun(
        "tile", batch, 4, capacities=LARGE_CAPACITIES, lazy=lazy, transport=transport, by_sort=by_sort, points=3000
    )  # fmt: skip
    assert_same_run(run, take(run, ranks, "cuda"), ordinary(run))


@pytest.mark.gpu
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 1), (2, 3), (4, 2)])
def test_run_of_graphs_on_gpus(ranks: int, batch: int, lazy: bool) -> None:
    run = TrainingRun(
        "tile", batch, 12, capacities=(1024, 1024, 8192), lazy=lazy, transport="peer", points=3000,
        captured=True,
    )  # fmt: skip
    outcomes = take(run, ranks, "cuda")
    assert all(outcome["redone"] > 0 for outcome in outcomes), "capacities must have changed under the graphs"
    assert_same_run(run, outcomes, ordinary(run))
