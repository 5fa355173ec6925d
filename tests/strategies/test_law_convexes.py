"""The law for 3D convexes: pixels, depth, losses and all gradients are those of one rank."""

from typing import Any

import pytest
import torch

from ns_multigpu.core.travelling_rows import RowsTravel
from ns_multigpu.core.types import Points
from ns_multigpu.core.world import World
from ns_multigpu.primitives.convexes.functions import Convexes
from strategies import STRATEGIES
from tests.ranks import run_ranks, skip_without_gpus
from tests.strategies.scene import make_points
from tests.strategies.test_law import Outcome, check, stitch, take_step

CASES = [("batch", 2), ("tile", 3), ("locality", 2)]
ALL = Convexes(sh_degree=3, depth=True)


def convexes(count: int, dtype: torch.dtype, device: Any = "cpu") -> Points:
    """Random convexes where `make_points` has Gaussians, of all sizes and edges, some of them coincident."""
    params = {name: value.detach() for name, value in make_points(count, dtype, device).params.items()}
    g = torch.Generator().manual_seed(2)
    size = params.pop("scales").exp().amax(-1, keepdim=True).cpu()
    del params["quats"]
    corners = 1.5 * size * torch.randn(count, 18, generator=g, dtype=torch.float64).to(dtype)
    deltas = torch.log((10 + 90 * torch.rand(count, 1, generator=g, dtype=torch.float64)).to(dtype) / size)
    sigmas = (
        torch.log((1 + 6 * torch.rand(count, 1, generator=g, dtype=torch.float64)).to(dtype)) - deltas - 2 * size.log()
    )
    params |= {"corners": corners.to(device), "deltas": deltas.to(device), "sigmas": sigmas.to(device)}
    return Points({name: value.clone().requires_grad_() for name, value in params.items()})


def step(
    world: World, strategy: str, views: int, points: int, dtype: torch.dtype = torch.float64, faint: bool = False,
    half: bool = False,
) -> Outcome:  # fmt: skip
    made = convexes(points, dtype, world.device)
    if faint:
        made.params["opacities"].data.sub_(3.0)
    spread = STRATEGIES[strategy](world)
    if half:
        assert isinstance(spread.rows, RowsTravel)
        spread.rows.half = True
    return take_step(spread, "convexes", views, points, dtype, kind=(ALL, made))


@pytest.mark.parametrize(("strategy", "size"), CASES)
def test_equals_single(strategy: str, size: int) -> None:
    expected = step(World.single(), "single", 4, 120)
    assert sum(float(image.std()) > 0.02 for image in stitch(expected["images"]).values()) >= 3
    assert all(float(gradient.abs().sum()) > 0 for gradient in expected["gradients"].values())
    assert float(expected["statistics"][0].sum()) > 0
    check(run_ranks(step, size, strategy, 4, 120), expected, torch.float64)


@pytest.mark.parametrize(("views", "points"), [(1, 0), (2, 1)])
def test_ranks_without_views_and_models_without_points(views: int, points: int) -> None:
    expected = step(World.single(), "single", views, points)
    check(run_ranks(step, 3, "tile", views, points), expected, torch.float64)


def test_pixel_equals_single_where_nothing_is_closed() -> None:
    """Convexes are dense all over their inside: where one closes a pixel, cells differ from one (docs/pixel.md)."""
    expected = step(World.single(), "single", 4, 120, faint=True)
    check(run_ranks(step, 2, "pixel", 4, 120, torch.float64, True), expected, torch.float64)


def test_half_a_wire_leaves_lines_whole() -> None:
    """Rounded to float16, lines would lose the edge's place: six times the error, and more in larger images."""
    expected = stitch(step(World.single(), "single", 3, 80, torch.float32)["images"])
    outcomes = run_ranks(step, 2, "tile", 3, 80, torch.float32, False, True)
    found = stitch([piece for outcome in outcomes for piece in outcome["images"]])
    apart = torch.cat([(found[view] - image).abs().flatten() for view, image in expected.items()])
    assert 0 < float(apart.max()) < 5e-4


@pytest.mark.gpu
@pytest.mark.parametrize(("strategy", "size"), CASES)
def test_equals_single_on_gpus(strategy: str, size: int) -> None:
    skip_without_gpus(size)
    expected = step(World.single("cuda:0"), "single", 4, 120, torch.float32)
    outcomes = run_ranks(step, size, strategy, 4, 120, torch.float32, device="cuda")
    check(outcomes, expected, torch.float32)
