"""The law for 2D Gaussians and 3D convexes: all that they render, losses and gradients are those of one rank, through
autograd and in steps that read nothing back."""

from functools import cache
from typing import Any

import pytest
import torch

from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.exchanged_rows import ExchangedRows
from ns_multigpu.core.exchange.transports import HierarchicalRows, make_transport
from ns_multigpu.core.step.forward import Forward
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.locality.options import LocalityOptions
from strategies import STRATEGIES
from strategies.locality import locality
from strategies.pixel import pixel
from tests.lib.ranks import DEVICES, run_ranks
from tests.strategies.scene import make_views
from tests.strategies.test_law import Outcome, check, held_at, on_machines, one_step, points_of, stitch, take_step
from tests.strategies.test_law_steps import CUT, POINTS, PORTRAIT, REPLICATED, check_outcomes, take_one

SURFACES = ["2dgs, all channels", "convex"]
LOSSES = {"normals": 1.0, "distortion": 0.1}
"""The weights of `take_step`."""
CELLS = 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("primitive", SURFACES)
@pytest.mark.parametrize(("strategy", "size"), [("batch", 2), ("tile", 3), ("locality", 2)])
def test_equals_single(strategy: str, size: int, primitive: str, device: str) -> None:
    dtype = torch.float64 if device == "cpu" else torch.float32
    outcomes = run_ranks(one_step, size, strategy, primitive, 5, 120, dtype, device=device)
    expected = one_step(World.single("cpu" if device == "cpu" else "cuda:0"), "single", primitive, 5, 120, dtype)
    assert sum(float(image.std()) > 0.02 for image in stitch(expected["images"]).values()) >= 4
    if primitive != "convex":
        distortions = [float(deep[..., 4].max()) for deep in stitch(expected["depths"]).values()]
        assert sum(most > 0.01 for most in distortions) >= 3
    assert all(float(gradient.abs().sum()) > 0 for gradient in expected["gradients"].values())
    assert float(expected["statistics"][0].sum()) > 0
    check(outcomes, expected, dtype)


@pytest.mark.parametrize("primitive", SURFACES)
@pytest.mark.parametrize(("views", "points"), [(1, 0), (2, 1)])
def test_ranks_without_views_and_models_without_points(views: int, points: int, primitive: str) -> None:
    expected = one_step(World.single(), "single", primitive, views, points, torch.float64)
    check(run_ranks(one_step, 3, "tile", primitive, views, points, torch.float64), expected, torch.float64)


@pytest.mark.parametrize("primitive", ["2dgs", "convex, faint"])
def test_pixel_equals_single(primitive: str) -> None:
    """Convexes are dense inside: where one closes a pixel, cells differ from one (docs/methods/pixel.md)."""
    expected = one_step(World.single(), "single", primitive, 4, 120, torch.float64)
    check(run_ranks(one_step, 2, "pixel", primitive, 4, 120, torch.float64), expected, torch.float64)


def test_pixel_refuses_further_channels() -> None:
    with pytest.raises(ValueError, match="normals, distortion, median cannot be put together"):
        one_step(World.single(), "pixel", SURFACES[0], 2, 10, torch.float64)


def half_step(world: World) -> Outcome:
    spread = STRATEGIES["tile"](world)
    assert isinstance(spread.rows, ExchangedRows)
    spread.rows.half = True
    return take_step(spread, "convex", 3, 80, torch.float32)


def test_half_a_wire_leaves_lines_whole() -> None:
    """Rounded to float16, lines would lose the edge's place: six times the error, and more in larger images."""
    expected = stitch(one_step(World.single(), "single", "convex", 3, 80, torch.float32)["images"])
    found = stitch([piece for outcome in run_ranks(half_step, 2) for piece in outcome["images"]])
    apart = torch.cat([(found[view] - image).abs().flatten() for view, image in expected.items()])
    assert 0 < float(apart.max()) < 5e-4


FLAT = [("single", 1, "captured"), ("batch", 3, "captured"), ("tile", 3, "captured"), ("locality", 2, "step")]
STEPS = [
    *(("2dgs, losses", *row) for row in FLAT), ("2dgs", "tile, sorted", 2, "step"),
    ("2dgs, plain colours", "batch", 2, "captured"), ("convex", "single", 1, "captured"),
    ("convex", "batch", 2, "captured"), ("convex", "batch", 3, "step"), ("convex", "tile", 3, "captured"),
    ("convex", "tile, sorted", 2, "step"), ("convex", "locality, relays", 4, "captured"),
    ("convex", "pixel, cells", 2, "captured"), ("convex, faint", "pixel, boundary splats", 3, "captured"),
]  # fmt: skip
"""Primitive, strategy, ranks and mode."""


def spread_of(world: World, name: str) -> Strategy:
    if name == "locality, relays":
        return locality(on_machines(world, 2) if world.size > 1 else world, LocalityOptions(relays=True))
    if name.startswith("pixel"):
        return pixel(world, PixelOptions(cells=CELLS, crossing="ghosts" if "boundary" in name else "none"))
    return STRATEGIES[name.partition(",")[0]](world)


def fused_step(world: World, primitive: str, name: str, mode: str) -> Outcome:
    spread, (kind, whole) = spread_of(world, name), points_of(primitive, POINTS, torch.float32, world.device)
    if "relays" in name:
        kernels: Any = kind.kernels()
        parts = (spread.rows, spread.gradients, spread.world)
        assert isinstance(make_transport(*parts, kernels, 8, 8, 8, peer=False), HierarchicalRows)
    count, options = REPLICATED if spread.placement.replicated else CUT, dict[str, Any]()
    if "losses" in primitive:
        options["losses"] = LOSSES
    return take_one(spread, kind, count, PORTRAIT, mode, "sorted" in name, whole=whole, **options)


@cache
def through_autograd(primitive: str, cells: bool, views: int) -> Outcome:
    """Return one rank's results, with all of space or with the same cells."""
    spread = spread_of(World.single(), "pixel, cells" if cells else "single")
    return take_step(spread, primitive, views, POINTS, torch.float32, PORTRAIT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("primitive", "name", "ranks", "mode"), STEPS)
def test_a_fused_step_equals_single(primitive: str, name: str, ranks: int, mode: str, device: str) -> None:
    outcomes = run_ranks(fused_step, ranks, primitive, name, mode, device=device)
    replicated = spread_of(World.single(), name).placement.replicated
    views = REPLICATED if replicated else CUT
    expected = through_autograd(primitive, "cells" in name, views)
    check_outcomes(outcomes, expected, views, PORTRAIT, replicated=replicated, sized="2dgs" in primitive)


def picture(world: World, strategy: str) -> list[Any]:
    """Return a view, as all ranks draw it for people to look at."""
    view = make_views(2, torch.float32, world.device, PORTRAIT)[0]
    spread, (kind, whole) = STRATEGIES[strategy](world), points_of("convex", POINTS, torch.float32, world.device)
    held, _ = held_at(spread, whole)
    kernels: Any = kind.kernels(depth=True)
    _, drawn = Forward(spread).draw(kernels, held, view)
    return [(p.patch, torch.cat([p.color, p.alpha, p.depth], dim=-1).cpu()) for p in drawn if p.depth is not None]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("tile", 2)])
def test_a_picture_is_what_the_functions_render(strategy: str, ranks: int) -> None:
    view, (kind, points) = make_views(2, torch.float32, size=PORTRAIT)[0], points_of("convex", POINTS, torch.float32)
    spread = STRATEGIES["single"](World.single())
    with torch.no_grad():
        (expected,) = spread.render(kind, points, [view], spread.plan([view])).pixels
    assert expected.depth is not None and float(expected.depth.std()) > 0.1
    whole = torch.cat([expected.color, expected.alpha, expected.depth], dim=-1)
    found = stitch([piece for parts in run_ranks(picture, ranks, strategy) for piece in parts])
    torch.testing.assert_close(found[0], whole, rtol=1e-5, atol=1e-5)
