"""Selective Adam in steps of replicas and of shards: torch's step of the points drawn, and nothing of the others'."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.lazy_adam import LazyAdam
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.step_settings import StepSettings
from ns_multigpu.core.types import Patch, Points
from ns_multigpu.core.world import World
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.primitives.courses import (
    HEIGHT,
    LAMBDA,
    RATES,
    WIDTH,
    Course,
    assert_same_course,
    batch_of,
    kernels_of,
    ordinary,
    scalars,
    step_of,
    take,
    together,
)
from tests.ranks import skip_without_gpus
from tests.strategies.scene import make_image, make_points

STEPS = 5
"""The third, with a batch of one, draws nothing at all."""
LARGE_ROOM = (8192, 8192, 65536)
BF16 = torch.bfloat16


def scattered(count: int, dtype: torch.dtype, device: torch.device) -> Points:
    """A scene of which every view misses much, and in which no camera lies."""
    params = dict(make_points(count, dtype, device).params)
    return Points(params | {"means": 1.8 * params["means"].detach()})


def of(strategy: str, batch: int, **options: Any) -> Course:
    return Course(strategy, batch, STEPS, **{"selective": True, "scene": scattered, **options})


def assert_others(found: dict[str, Tensor], dense: dict[str, Tensor]) -> None:
    """Far from the dense course, in units of what rounding may do to a parameter."""
    for name, rate in RATES.items():
        assert ((found[name] - dense[name]).abs() > 0.2 * rate).float().mean() > 0.05, name


@pytest.mark.parametrize(
    ("strategy", "ranks", "batch"),
    [("batch", 1, 1), ("batch", 1, 2), ("batch", 2, 2), ("batch", 3, 3),
     ("tile", 1, 1), ("tile", 2, 1), ("tile", 2, 2), ("tile", 3, 2)],
)  # fmt: skip
def test_they_follow_the_ordinary_selective_course(strategy: str, ranks: int, batch: int) -> None:
    course = of(strategy, batch)
    found = take(course, ranks)
    assert_same_course(course, found, ordinary(course))
    assert_others(together(course, found), ordinary(replace(course, selective=False)))


def test_a_rank_without_points() -> None:
    course = of("tile", 1, bounds=(0, 7, 7, 300))
    assert_same_course(course, take(course, 3), ordinary(course))


@pytest.mark.parametrize(("strategy", "room"), [("batch", (64, 1024, 128)), ("tile", (16, 16, 64))])
def test_capacities_that_are_too_small_cost_a_step_and_change_nothing(
    strategy: str, room: tuple[int, int, int]
) -> None:
    course = of(strategy, 2, room=room)
    found = take(course, 2)
    assert all(int(o["redone"]) >= 1 for o in found)
    assert_same_course(course, found, ordinary(course))


@pytest.mark.parametrize("strategy", ["batch", "tile"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_compact_moments(ranks: int, strategy: str) -> None:
    course = of(strategy, 2, moment=BF16)
    full, found = ordinary(course), together(course, take(course, ranks))
    for name, rate in RATES.items():
        assert (found[name] - full[name]).abs().mean() < 0.05 * STEPS * rate, name
        v, w = full[f"v of {name}"], found[f"v of {name}"]
        assert w.dtype == BF16 and (w.float() - v).norm() < 0.03 * v.norm(), name
        undrawn = full["count"] == 0
        assert not w[undrawn].any()


# ---- of one step, what is left alone ----


def one_step(strategy: str, device: str, moment: torch.dtype, lazy: bool = False) -> None:
    """Takes the step of a model that has moments already; half of the points lie behind the camera."""
    world = World.single(device if device == "cpu" else "cuda:0")
    place, points = world.device, 200
    params = {k: v.detach().clone() for k, v in make_points(points, torch.float32, place).params.items()}
    view = batch_of(0, 1, place)[0]
    behind = torch.arange(points, device=place) % 2 == 0
    away = torch.tensor([0.0, 0.0, 9.0], device=place) + params["means"] @ view.viewmat[:3, :3].T + view.viewmat[:3, 3]
    mirrored = (away * torch.tensor([1.0, 1.0, -1.0], device=place) - view.viewmat[:3, 3]) @ view.viewmat[:3, :3]
    params["means"] = torch.where(behind[:, None], mirrored, params["means"])
    g = torch.Generator().manual_seed(7)
    moments = {
        k: tuple((1e-3 * torch.rand(v.shape, generator=g)).to(place, moment) for _ in (0, 1)) for k, v in params.items()
    }
    count = {"grad2d": torch.zeros(points), "count": torch.zeros(points), "radii": torch.zeros(points)}
    statistics = {k: v.to(place) for k, v in count.items()}
    put_off = LazyAdam.make(points, place) if lazy else None
    settings = StepSettings(WIDTH, HEIGHT, 1, LAMBDA, 1024, 1024, 16384)
    kernels = kernels_of(absgrad=False, selective=True)
    one = step_of(world, strategy, params, settings, "own", moments, put_off, kernels, statistics)
    before = {k: [t.clone() for t in (params[k], *moments[k])] for k in ORDER}
    one.viewmats[0], one.Ks[0] = view.viewmat, view.K
    one.scalars.copy_(scalars(9))
    one.take(Plan.of([[Patch.whole(0, view)]]), [make_image(view).to(place)])
    assert (one.status().done, one.status().full) == (1, False)
    drawn = statistics["count"] > 0
    assert 20 < int(drawn.sum()) <= 100 and not drawn[behind].any()
    for name in ORDER:
        for now, old in zip((params[name], *moments[name]), before[name], strict=True):
            assert torch.equal(now[~drawn], old[~drawn]), name
            assert (now[drawn] != old[drawn]).any(), name


@pytest.mark.parametrize("moment", [torch.float32, BF16])
@pytest.mark.parametrize("strategy", ["batch", "tile"])
def test_points_that_are_not_drawn_stay_as_they_are(strategy: str, moment: torch.dtype) -> None:
    one_step(strategy, "cpu", moment)


@pytest.mark.parametrize("strategy", ["batch", "tile"])
def test_a_selective_step_puts_nothing_off(strategy: str) -> None:
    with pytest.raises(ValueError, match=r"selective step puts nothing off: .* Leave lazy out"):
        one_step(strategy, "cpu", torch.float32, lazy=True)


# ---- on GPUs ----


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (1, 3), (2, 2), (4, 8)])
def test_replicas_on_gpus(ranks: int, batch: int) -> None:
    skip_without_gpus(ranks)
    course = of("batch", batch, points=3000)
    assert_same_course(course, take(course, ranks, "cuda"), ordinary(course))


@pytest.mark.gpu
@pytest.mark.parametrize(("transport", "by_sort"), [("collective", False), ("peer", True)])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 1), (2, 3), (4, 4)])
def test_shards_on_gpus(ranks: int, batch: int, transport: str, by_sort: bool) -> None:
    skip_without_gpus(ranks)
    course = of("tile", batch, points=3000, room=LARGE_ROOM, transport=transport, by_sort=by_sort)
    assert_same_course(course, take(course, ranks, "cuda"), ordinary(course))


@pytest.mark.gpu
@pytest.mark.parametrize("moment", [torch.float32, BF16])
@pytest.mark.parametrize("strategy", ["batch", "tile"])
def test_points_that_are_not_drawn_stay_as_they_are_on_gpus(strategy: str, moment: torch.dtype) -> None:
    one_step(strategy, "cuda", moment)
