"""Selective Adam in fused steps and steps of shards: torch's step of the points drawn, and nothing of the others'."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.adam import adam_scalars
from cuda_ext.ops.lazy_adam import LazyAdam
from ns_multigpu.core.types import Patch, Points
from ns_multigpu.core.world import World
from ns_multigpu.primitives.fused_step import ORDER, FusedStep, StepSettings
from ns_multigpu.primitives.tile_rows import OwnRows
from ns_multigpu.primitives.tile_settings import TileSettings, bands
from ns_multigpu.primitives.tile_step import TileStep
from tests.primitives import test_fused_step, test_tile_step
from tests.primitives.test_compact_steps import whole
from tests.primitives.test_fused_step import HEIGHT, LAMBDA, RATES, WIDTH, batch_of, fused, ordinary
from tests.primitives.test_tile_step import POINTS, sharded
from tests.ranks import run_ranks, skip_without_gpus
from tests.strategies.scene import make_image, make_points

STEPS = 5
"""The third, with a batch of one, draws nothing at all."""
ROOM, LARGE_ROOM = (1024, 1024, 4096), (8192, 8192, 65536)
BF16 = torch.bfloat16


def scattered(count: int, dtype: torch.dtype, device: torch.device) -> Points:
    """A scene of which every view misses much, and in which no camera lies."""
    params = dict(make_points(count, dtype, device).params)
    return Points(params | {"means": 1.8 * params["means"].detach()})


def expected(batch: int, points: int = POINTS, *, selective: bool = True) -> dict[str, Tensor]:
    return ordinary(points, batch, STEPS, False, "cpu", selective, scattered)


def of_replicas(
    ranks: int, batch: int, points: int = POINTS, device: str = "cpu", *, room: tuple[int, int] = (0, 0),
    moment: torch.dtype = torch.float32,
) -> list[dict[str, Tensor]]:  # fmt: skip
    arguments = (points, batch // ranks, STEPS, False, *room, False, moment, True, scattered)
    return run_ranks(fused, ranks, *arguments, device=device)


def of_shards(
    ranks: int, batch: int, points: int = POINTS, device: str = "cpu", *, bounds: tuple[int, ...] | None = None,
    room: tuple[int, int, int] = ROOM, transport: str = "collective", by_sort: bool = False,
    moment: torch.dtype = torch.float32,
) -> list[dict[str, Tensor]]:  # fmt: skip
    arguments = (batch, STEPS, False, bounds, room, False, transport, by_sort, points, moment, True, scattered)
    return run_ranks(sharded, ranks, *arguments, device=device)


def assert_others(found: dict[str, Tensor], dense: dict[str, Tensor]) -> None:
    """Far from the dense course, in units of what rounding may do to a parameter."""
    for name, rate in RATES.items():
        assert ((found[name] - dense[name]).abs() > 0.2 * rate).float().mean() > 0.05, name


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (1, 2), (2, 2), (3, 3)])
def test_replicas_follow_the_ordinary_selective_course(ranks: int, batch: int) -> None:
    found = of_replicas(ranks, batch)
    test_fused_step.assert_same_course(found, expected(batch))
    assert_others(found[0], expected(batch, selective=False))


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_shards_follow_the_ordinary_selective_course(ranks: int, batch: int) -> None:
    found = of_shards(ranks, batch)
    test_tile_step.assert_same_course(found, expected(batch))
    assert_others(whole(found), expected(batch, selective=False))


def test_a_rank_without_points() -> None:
    found = of_shards(3, 1, bounds=(0, 7, 7, POINTS))
    test_tile_step.assert_same_course(found, expected(1))


def test_capacities_that_are_too_small_cost_a_step_and_change_nothing() -> None:
    wanted = expected(2)
    replicas, shards = of_replicas(2, 2, room=(64, 128)), of_shards(2, 2, room=(16, 16, 64))
    assert all(int(o["redone"]) >= 1 for o in (*replicas, *shards))
    test_fused_step.assert_same_course(replicas, wanted)
    test_tile_step.assert_same_course(shards, wanted)


@pytest.mark.parametrize("ranks", [1, 2])
def test_compact_moments(ranks: int) -> None:
    full = expected(2)
    for found in (of_replicas(ranks, 2, moment=BF16)[0], whole(of_shards(ranks, 2, moment=BF16))):
        for name, rate in RATES.items():
            assert (found[name] - full[name]).abs().mean() < 0.05 * STEPS * rate, name
            v, w = full[f"v of {name}"], found[f"v of {name}"]
            assert w.dtype == BF16 and (w.float() - v).norm() < 0.03 * v.norm(), name
            undrawn = full["count"] == 0
            assert not w[undrawn].any()


# ---- of one step, what is left alone ----


def one_step(kind: str, device: str, moment: torch.dtype, lazy: bool = False) -> None:
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
    one: Any
    if kind == "replicas":
        settings = StepSettings(WIDTH, HEIGHT, 1, 2, False, False, LAMBDA, 1024, 16384, selective=True)
        one = FusedStep(params, moments, statistics, settings, world, torch.float32, put_off)  # pyright: ignore
    else:
        shards = TileSettings(WIDTH, HEIGHT, 1, 2, False, False, LAMBDA, 1024, 1024, 16384, selective=True)
        rows = OwnRows(world, shards.rows, shards.segment, shards.words)
        one = TileStep(params, moments, statistics, shards, world, rows, put_off)  # pyright: ignore
    before = {k: [t.clone() for t in (params[k], *moments[k])] for k in ORDER}
    one.viewmats[0], one.Ks[0] = view.viewmat, view.K
    one.scalars.copy_(torch.tensor([adam_scalars(RATES[k], (0.9, 0.999), 1e-15, 9) for k in ORDER]))
    image = make_image(view).to(place)
    if kind == "replicas":
        one.targets[0] = image
        one.render()
    else:
        one.render(bands([[Patch.whole(0, view)]], one.settings), [image])
    one.update()
    assert (one.status().done, one.status().full) == (1, False)
    drawn = statistics["count"] > 0
    assert 20 < int(drawn.sum()) <= 100 and not drawn[behind].any()
    for name in ORDER:
        for now, old in zip((params[name], *moments[name]), before[name], strict=True):
            assert torch.equal(now[~drawn], old[~drawn]), name
            assert (now[drawn] != old[drawn]).any(), name


@pytest.mark.parametrize("moment", [torch.float32, BF16])
@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_points_that_are_not_drawn_stay_as_they_are(kind: str, moment: torch.dtype) -> None:
    one_step(kind, "cpu", moment)


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_a_selective_step_puts_nothing_off(kind: str) -> None:
    with pytest.raises(ValueError, match=r"selective step puts nothing off: .* Leave lazy out"):
        one_step(kind, "cpu", torch.float32, lazy=True)


# ---- on GPUs ----


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (1, 3), (2, 2), (4, 8)])
def test_replicas_on_gpus(ranks: int, batch: int) -> None:
    skip_without_gpus(ranks)
    test_fused_step.assert_same_course(of_replicas(ranks, batch, 3000, "cuda"), expected(batch, 3000))


@pytest.mark.gpu
@pytest.mark.parametrize(("transport", "by_sort"), [("collective", False), ("atomics", True), ("transfer", False)])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 1), (2, 3), (4, 4)])
def test_shards_on_gpus(ranks: int, batch: int, transport: str, by_sort: bool) -> None:
    skip_without_gpus(ranks)
    found = of_shards(ranks, batch, 3000, "cuda", room=LARGE_ROOM, transport=transport, by_sort=by_sort)
    test_tile_step.assert_same_course(found, expected(batch, 3000))


@pytest.mark.gpu
@pytest.mark.parametrize("moment", [torch.float32, BF16])
@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_points_that_are_not_drawn_stay_as_they_are_on_gpus(kind: str, moment: torch.dtype) -> None:
    one_step(kind, "cuda", moment)
