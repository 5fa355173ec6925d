"""The law for `pixel`. With splats clipped to their cells N ranks equal one rank with the same cells; with boundary
splats they equal `single`, with any cells. And the deviation from `single` without them."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch

from ns_multigpu.cells.boundary import CellsInViews
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.seen import camera_position
from ns_multigpu.cells.sharing import CellPixels
from ns_multigpu.cells.tree import CellTree, Split
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.boundary_rows import BoundaryRows
from ns_multigpu.core.exchange.composite import CompositePixels
from ns_multigpu.core.exchange.legs import LocalRows
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import Points
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies import STRATEGIES
from strategies.pixel import pixel
from tests.lib.ranks import on_gpus, run_ranks
from tests.strategies.scene import make_points, make_views
from tests.strategies.test_law import PRIMITIVES, Outcome, check, one_step, points_of, stitch, take_step
from tests.strategies.test_law_steps import CUT, KERNELS, MODES, PORTRAIT, check_outcomes, take_one

VIEWS, POINTS = 5, 150
Boundary = Literal["none", "ghosts"]
BOUNDARIES: list[Boundary] = ["none", "ghosts"]


def strategy_of(cells: int, world: World, **options: Any) -> Strategy:
    return pixel(world, PixelOptions(cells=cells, **{"crossing": "none", **options}))


def step_of(
    boundary: Boundary, cells: int, world: World, primitive: str, views: int, points: int, dtype: torch.dtype,
    size: tuple[int, int] | None = None,
) -> Outcome:  # fmt: skip
    return take_step(strategy_of(cells, world, crossing=boundary), primitive, views, points, dtype, size)


def alone(boundary: Boundary, cells: int, *rest: Any, device: str = "cpu") -> Outcome:
    """Return the step that ranks must equal: `single`'s, or that of one rank with the same cells."""
    world = World.single(device)
    return one_step(world, "single", *rest) if boundary == "ghosts" else step_of(boundary, cells, world, *rest)


@pytest.mark.parametrize(
    ("boundary", "ranks", "cells", "primitive"),
    [
        *(("none", ranks, ranks, primitive) for ranks in (2, 3) for primitive in PRIMITIVES),
        ("none", 2, 5, "gaussians"), ("none", 3, 4, "gaussians"), ("ghosts", 1, 5, "gaussians"),
        ("ghosts", 2, 2, "gaussians, antialiased, absgrad"), ("ghosts", 2, 5, "gaussians"),
        ("ghosts", 3, 3, "gaussians, plain colours"),
    ],
)  # fmt: skip
def test_ranks_equal_one(boundary: Boundary, ranks: int, cells: int, primitive: str) -> None:
    rest = primitive, VIEWS, POINTS, torch.float64 if primitive in ("gaussians", "4D gaussians") else torch.float32
    expected = alone(boundary, cells, *rest)
    assert sum(float(image.std()) > 0.02 for image in stitch(expected["images"]).values()) >= 4
    check(run_ranks(partial(step_of, boundary, cells), ranks, *rest), expected, rest[-1])


def test_one_cell_is_single() -> None:
    expected = one_step(World.single(), "single", "gaussians", VIEWS, POINTS, torch.float64)
    check([step_of("none", 1, World.single(), "gaussians", VIEWS, POINTS, torch.float64)], expected, torch.float64)
    assert pixel(World.single()).placement.kind == "ByCells 1", "the default"
    with pytest.raises(ValueError, match=r"cells 1: each of the 2 GPUs wants a cell at least\. Give 2 or more"):
        strategy_of(1, replace(World.single(), size=2))


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(("views", "points", "size"), [(2, 40, None), (1, 0, None), (3, 1, None), (1, 60, (40, 14))])
def test_ranks_without_points_or_pixels(views: int, points: int, size: Any, boundary: Boundary) -> None:
    """Cells without points, models without any, a view that sees no cell, and one row of tiles for all ranks."""
    rest = "gaussians", views, points, torch.float64, size
    check(run_ranks(partial(step_of, boundary, 3), 3, *rest), alone(boundary, 3, *rest), torch.float64)


def half_step(world: World, wire: str, mode: str) -> Outcome:
    """Return a step with this wire, and the bytes that it sent."""
    world.traffic.since("step")
    spread = strategy_of(2, world, wire=wire)
    if mode == "autograd":
        outcome = take_step(spread, KERNELS[0], CUT, POINTS, torch.float32, PORTRAIT)
    else:
        kind = PRIMITIVES[KERNELS[0]]()
        assert isinstance(kind, Gaussians)
        outcome = take_one(spread, kind, CUT, PORTRAIT, mode)
    return outcome | {"sent": world.traffic.since("step")}


@pytest.mark.parametrize("mode", ["autograd", "step"])
def test_half_a_wire_rounds(mode: str) -> None:
    """By less than a thousandth of a colour, and a hundredth of a gradient; and sends half."""
    full, half = (run_ranks(half_step, 2, wire, mode) for wire in ("full", "half"))
    assert all(h["sent"] < 0.62 * f["sent"] for h, f in zip(half, full, strict=True)), "other things are sent too"
    images = [stitch([piece for outcome in outcomes for piece in outcome["images"]]) for outcomes in (full, half)]
    off = max(float((images[1][view] - image).abs().max()) for view, image in images[0].items())
    assert 1e-6 < off < 1e-3
    for name, gradient in full[0]["gradients"].items():
        error = float((half[0]["gradients"][name] - gradient).norm() / gradient.norm())
        assert 1e-6 < error < 1e-2, name


class GivenCells(ByCells):
    """Cells that are cut where a test says."""

    splits: tuple[Split, ...] = ()

    def _cut(self, where: torch.Tensor, work: torch.Tensor, world: World) -> torch.Tensor:
        self.tree, self._stale, self._moved = CellTree(self.splits), True, True
        return self.tree.of(where)


def with_splits(world: World, splits: tuple[Split, ...], boundary: Boundary = "none") -> Strategy:
    options = PixelOptions(cells=len(splits) + 1, crossing=boundary)
    space = GivenCells(world, options)
    space.splits = splits
    cells_in_views = CellsInViews(space) if boundary == "ghosts" else None
    return replace(
        pixel(world, options), placement=space, assignment=CellPixels(space),
        pixels=CompositePixels(space.local, regions=cells_in_views),
        rows=LocalRows() if cells_in_views is None else BoundaryRows(cells_in_views),
    )  # fmt: skip


def where_cameras_stand() -> dict[str, tuple[Split, ...]]:
    """Cells for the cameras of the scene, which are 3 from its middle."""
    x, y, _ = camera_position(make_views(VIEWS, torch.float64)[1])
    return {
        "in a cell": (Split(0, 0.0, 1, -3), Split(1, 0.3, -1, -2)),
        "on a plane": (Split(0, x, 1, -3), Split(1, y, -1, -2)),
        "all points in one cell": (Split(0, 50.0, 1, -3), Split(2, -50.0, -1, -2)),
    }


def step_within(world: World, where: str, boundary: Boundary | None) -> Outcome:
    """Return a step of points around the cameras; of `single` without a boundary."""
    points = make_points(POINTS, torch.float64)
    means = (4.0 * points.params["means"]).detach().requires_grad_()
    kind = Gaussians(depth=True), Points({**points.params, "means": means})
    splits = where_cameras_stand()[where]
    spread = STRATEGIES["single"](world) if boundary is None else with_splits(world, splits, boundary)
    return take_step(spread, "", VIEWS, POINTS, torch.float64, kind=kind)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("where", where_cameras_stand())
def test_wherever_cameras_and_points_are(where: str, boundary: Boundary) -> None:
    expected = step_within(World.single(), where, None if boundary == "ghosts" else boundary)
    assert sum(float(image.std()) > 0.02 for image in stitch(expected["images"]).values()) >= VIEWS - 1
    check(run_ranks(step_within, 3, where, boundary), expected, torch.float64)


def test_deviation_from_single() -> None:
    """Splats that extend into another cell are blended with their own cell's. The error is visible with opaque splats
    of a fifth of the scene, and negligible with small ones."""

    def psnr(size: float) -> float:
        points = make_points(POINTS, torch.float64)
        params = {**points.params, "scales": points.params["scales"] + math.log(size)}
        kind = Gaussians(depth=True), Points({k: v.detach().requires_grad_() for k, v in params.items()})
        found, wanted = (
            stitch(take_step(spread, "", VIEWS, POINTS, torch.float64, kind=kind)["images"])
            for spread in (strategy_of(4, World.single()), STRATEGIES["single"](World.single()))
        )
        error = torch.cat([(found[view] - image).flatten() for view, image in wanted.items()])
        return -10 * math.log10(float(error.square().mean()) + 1e-30)

    large, small = psnr(1.0), psnr(0.2)
    assert 35 < large < 55 and small > 58


def fused_step(world: World, boundary: Boundary, cells: int, primitive: str, mode: str) -> Outcome:
    kind = PRIMITIVES[primitive]()
    assert isinstance(kind, Gaussians)
    return take_one(strategy_of(cells, world, crossing=boundary), kind, CUT, PORTRAIT, mode)


FUSED = [(boundary, *row) for boundary in BOUNDARIES for row in ((1, 3), (2, 2), (2, 3), (3, 3))]


@pytest.mark.parametrize(
    ("boundary", "ranks", "cells", "device"),
    [*((*row, "cpu") for row in FUSED), *(on_gpus(*row) for row in [*FUSED, ("none", 4, 4), ("ghosts", 4, 4)])],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_equals_one(mode: str, boundary: Boundary, ranks: int, cells: int, device: str) -> None:
    for primitive in KERNELS if device == "cuda" else [KERNELS[ranks % len(KERNELS)]]:
        outcomes = run_ranks(fused_step, ranks, boundary, cells, primitive, mode, device=device)
        expected = alone(boundary, cells, primitive, CUT, POINTS, torch.float32, PORTRAIT)
        check_outcomes(outcomes, expected, CUT, PORTRAIT, replicated=False)


@pytest.mark.gpu
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(("ranks", "cells"), [(1, 3), (2, 2), (2, 3), (4, 4)])
def test_ranks_equal_one_on_gpus(ranks: int, cells: int, boundary: Boundary) -> None:
    rest = "gaussians", VIEWS, POINTS, torch.float32
    outcomes = run_ranks(partial(step_of, boundary, cells), ranks, *rest, device="cuda")
    check(outcomes, alone(boundary, cells, *rest, device="cuda:0"), torch.float32)


def in_whole_views(world: World, mode: str) -> Outcome:
    """A fused step as where links are fast: every rank draws its cell over whole views."""
    spread = STRATEGIES["pixel"](world)
    spread.assignment.fast_links = True
    kind, whole = points_of("gaussians", POINTS, torch.float32, world.device)
    return take_one(spread, kind, 3, None, mode, whole=whole)


@pytest.mark.parametrize(("ranks", "device"), [(4, "cpu"), on_gpus(2), on_gpus(4)])
def test_steps_in_whole_views_equal_single(ranks: int, device: str) -> None:
    """A band's halo has more pixels than the band."""
    kind = points_of("gaussians", POINTS, torch.float32)
    expected = take_step(STRATEGIES["single"](World.single()), "gaussians", 3, POINTS, torch.float32, None, kind=kind)
    check_outcomes(run_ranks(in_whole_views, ranks, "captured", device=device), expected, 3, None, replicated=False)
