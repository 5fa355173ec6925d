"""Steps of primitives without fused operators of their own: cancelled steps, and reports."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import adam_scalars
from cuda_ext.ops.optim.lazy_adam import LazyAdam
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transports import OwnRows
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.types import Points
from ns_multigpu.primitives.composed_kernels import ComposedKernels, _of_views
from ns_multigpu.primitives.convexes.functions import Convexes
from ns_multigpu.primitives.moving.functions import MovingGaussians
from ns_multigpu.primitives.surfels.functions import Surfels
from strategies import STRATEGIES
from tests.strategies.scene import make_convexes, make_image, make_moving_points, make_points, make_views

SIZE, VIEWS, COUNT = (45, 61), 2, 60
PRIMITIVES: dict[str, Any] = {
    "4dgs": MovingGaussians(sh_degree=2), "2dgs": Surfels(sh_degree=2), "convex": Convexes(sh_degree=2)
}  # fmt: skip
MAKE = {"4dgs": make_moving_points, "2dgs": make_points, "convex": make_convexes}
STATISTICS = ("grad2d", "count", "radii")


def points_of(name: str, spare: int = 0) -> Points:
    """Return `count` points, and spare rows without a position."""
    params = MAKE[name](COUNT, torch.float32).params
    params = {key: value.detach() for key, value in params.items()}
    if name == "2dgs":
        params["scales"] = params["scales"][:, :2].contiguous()
    padding = {key: value.new_zeros(spare, *value.shape[1:]) for key, value in params.items()}
    padding["means"].fill_(torch.nan)
    return Points({key: torch.cat([value, padding[key]]) for key, value in params.items()})


class StepRun:
    """Steps of one rank, of as many points."""

    def __init__(self, name: str, points: Points, rows: int = 400, intersections: int = 4096) -> None:
        world = World.single()
        views = make_views(VIEWS + 1, torch.float32, size=SIZE)[:VIEWS]  # the last one looks away
        settings = StepSettings(*SIZE, VIEWS, 0.2, rows, 0, intersections)
        kernels: Any = PRIMITIVES[name].kernels()
        self.params = {key: value.clone() for key, value in points.params.items()}
        self.moments = {key: (torch.zeros_like(p), torch.zeros_like(p)) for key, p in self.params.items()}
        self.statistics = {key: torch.zeros(len(points)) for key in STATISTICS}
        spread = STRATEGIES["single"](world)
        transport = OwnRows(world, kernels, rows, 0, settings.words(spread.assignment))
        self.step = Step(kernels, self.params, self.moments, self.statistics, settings, spread, transport)
        self.step.viewmats.copy_(torch.stack([view.viewmat for view in views]))
        self.step.Ks.copy_(torch.stack([view.K for view in views]))
        self.step.times.copy_(torch.tensor([view.time for view in views]))
        self.step.scalars.copy_(torch.tensor(adam_scalars(1e-3, (0.9, 0.999), 1e-8, 1)).expand_as(self.step.scalars))
        self._plan, self._images = spread.plan(views), [make_image(view) for view in views]

    def take(self) -> None:
        self.step.take(self._plan, self._images)

    def all(self) -> list[Tensor]:
        moments = [one for pair in self.moments.values() for one in pair]
        return [value.clone() for value in (*self.params.values(), *moments, *self.statistics.values())]


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "intersections"])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_step_beyond_capacity_changes_nothing(name: str, rows: bool) -> None:
    small = {"rows": 30} if rows else {"intersections": 40}
    run = StepRun(name, points_of(name), **small)
    before = run.all()
    run.take()
    status = run.step.status()
    assert status.full and status.done == 0 and (status.rows if rows else status.intersections) > 40
    assert all(torch.equal(now, then) for now, then in zip(run.all(), before, strict=True))
    assert float(run.step.report[-1]) == 0


@pytest.mark.parametrize("name", PRIMITIVES)
def test_spare_storage_is_not_rendered(name: str) -> None:
    """A refinement moves points into storage with spare rows, which have no position."""
    plain, roomy = (StepRun(name, points_of(name, spare)) for spare in (0, 20))
    for run in (plain, roomy):
        run.take()
        run.take()
        assert run.step.status().done == 2
    for a, b in zip(plain.all(), roomy.all(), strict=True):
        torch.testing.assert_close(b[:COUNT], a, rtol=1e-6, atol=1e-7)
        assert bool(b[:COUNT].isfinite().all())
    assert not any(value[COUNT:].any() for value in roomy.statistics.values())
    for key, value in plain.statistics.items():
        if name == "convex" and key == "radii":
            assert not value.any(), "no rule is about sizes on the screen"
        else:
            assert int(value.count_nonzero()) > 20


@pytest.mark.parametrize("name", PRIMITIVES)
def test_points_are_processed_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many for the memory that it takes to see at once which show."""
    step = StepRun(name, points_of(name)).step
    expected = step._kernels.project(step._model, step._cameras(range(VIEWS), step.views()), 400)
    assert int(expected.count) > 20 and int(expected.point_ids.max()) > 40
    for kind in (ComposedKernels, type(step._kernels)):
        monkeypatch.setattr(kind, "at_once", 16)
    found = step._kernels.project(step._model, step._cameras(range(VIEWS), step.views()), 400)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_nonfinite_values_are_reported(name: str) -> None:
    step = StepRun(name, points_of(name)).step
    kernels, model, cameras = step._kernels, step._model, step._cameras(range(VIEWS), step.views())
    rows = kernels.project(model, cameras, 400)
    first = int((rows.radii > 0).all(-1).nonzero()[0])
    assert rows.view_ids[first] == 0
    for line, views, flagged in ((first, None, True), (first, range(1, 2), False), (399, None, False)):
        records, finite_flag = torch.zeros(400, kernels.record_floats), torch.ones(1)
        records[line, 5] = torch.inf
        kernels.update(model, cameras, step.scalars, rows, records, finite_flag, views)
        assert bool(finite_flag.isfinite()) != flagged and (flagged or float(finite_flag) == 0)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_options_unsupported_by_the_kernels_are_refused(name: str) -> None:
    kind, points = PRIMITIVES[name], points_of(name)
    kernels: Any = kind.kernels(opacity_weight=0.0)
    with pytest.raises(
        ValueError, match=r"kernels of (2D Gaussians|4D Gaussians|3D convexes) have no option 'opacity_weight'"
    ):
        kind.kernels(opacity_weight=0.1)
    with pytest.raises(ValueError, match="leave lazy out"):
        kernels.model(points.params, {}, {}, LazyAdam.make(COUNT, torch.device("cpu")))
    assert not kernels.can_defer
    if name != "4dgs":
        with pytest.raises(ValueError, match="cross the wire whole"):
            kernels.wire(half=True, slots=False)


def test_without_points() -> None:
    for name in PRIMITIVES:
        empty = Points({key: value[:0] for key, value in points_of(name).params.items()})
        run = StepRun(name, empty)
        run.take()
        assert run.step.status().done == 1 and float(run.step.report[-1]) == 0


def test_sizes_of_views_that_differ() -> None:
    like, ids = torch.zeros(1), torch.tensor([0, 0, 1], dtype=torch.int32)
    assert _of_views([5, 6, 7, 8], ids, like).tolist() == [[5, 6], [5, 6], [7, 8]]
    assert _of_views([5, 6, 5, 6], ids, like).tolist() == [[5, 6]] * 3
