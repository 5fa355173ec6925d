"""The law for 3D convexes: pixels, depth, losses and all gradients are those of one rank, through autograd and in steps
that read nothing back."""

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
from ns_multigpu.core.types import Points
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.primitives.convexes.functions import Convexes
from strategies import STRATEGIES
from strategies.locality import locality
from strategies.pixel import pixel
from tests.lib.ranks import run_ranks, skip_without_gpus
from tests.strategies.scene import make_points, make_views
from tests.strategies.test_law import Outcome, check, held_at, on_machines, stitch, take_step
from tests.strategies.test_law_steps import CUT, POINTS, PORTRAIT, REPLICATED, check_outcomes, take_one

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


def faint(count: int, dtype: torch.dtype, device: Any = "cpu") -> Points:
    """Return the same, hardly to be seen: no pixel is closed."""
    made = convexes(count, dtype, device)
    made.params["opacities"].data.sub_(3.0)
    return made


def step(
    world: World, strategy: str, views: int, points: int, dtype: torch.dtype = torch.float64, open_: bool = False,
    half: bool = False,
) -> Outcome:  # fmt: skip
    made = (faint if open_ else convexes)(points, dtype, world.device)
    spread = STRATEGIES[strategy](world)
    if half:
        assert isinstance(spread.rows, ExchangedRows)
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
    """Convexes are dense inside: where one closes a pixel, cells differ from one (docs/methods/pixel.md)."""
    expected = step(World.single(), "single", 4, 120, open_=True)
    check(run_ranks(step, 2, "pixel", 4, 120, torch.float64, True), expected, torch.float64)


def test_half_a_wire_leaves_lines_whole() -> None:
    """Rounded to float16, lines would lose the edge's place: six times the error, and more in larger images."""
    expected = stitch(step(World.single(), "single", 3, 80, torch.float32)["images"])
    outcomes = run_ranks(step, 2, "tile", 3, 80, torch.float32, False, True)
    found = stitch([piece for outcome in outcomes for piece in outcome["images"]])
    apart = torch.cat([(found[view] - image).abs().flatten() for view, image in expected.items()])
    assert 0 < float(apart.max()) < 5e-4


STEPS = [
    ("single", 1, "captured"), ("batch", 2, "captured"), ("batch", 3, "step"), ("tile", 3, "captured"),
    ("tile, sorted", 2, "step"), ("locality, relays", 4, "captured"), ("pixel, cells", 2, "captured"),
    ("pixel, boundary splats", 3, "captured"),
]  # fmt: skip
CELLS = 3


def spread_of(world: World, name: str) -> Strategy:
    if name == "locality, relays":
        return locality(on_machines(world, 2), LocalityOptions(relays=True))
    if name.startswith("pixel"):
        return pixel(world, PixelOptions(cells=CELLS, crossing="ghosts" if "boundary" in name else "none"))
    return STRATEGIES[name.partition(",")[0]](world)


def fused_step(world: World, name: str, mode: str) -> Outcome:
    spread = spread_of(world, name)
    if "relays" in name:
        kernels: Any = Convexes(sh_degree=3).kernels()
        parts = (spread.rows, spread.gradients, spread.world)
        transport = make_transport(*parts, kernels, 8, 8, 8, peer=False)
        assert isinstance(transport, HierarchicalRows)
    whole = (faint if "boundary" in name else convexes)(POINTS, torch.float32, world.device)
    count = REPLICATED if spread.placement.replicated else CUT
    return take_one(spread, ALL, count, PORTRAIT, mode, "sorted" in name, whole=whole)


@cache
def through_autograd(cells: bool, open_: bool, views: int) -> Outcome:
    """Return one rank's results, with all of space or with the same cells."""
    spread = spread_of(World.single(), "pixel, cells" if cells else "single")
    whole = (faint if open_ else convexes)(POINTS, torch.float32)
    return take_step(spread, "convexes", views, POINTS, torch.float32, PORTRAIT, kind=(ALL, whole))


def check_fused(outcomes: list[Outcome], name: str) -> None:
    """Return whether ranks together did what one rank does through autograd."""
    replicated = spread_of(World.single(), name).placement.replicated if "relays" not in name else False
    views = REPLICATED if replicated else CUT
    expected = through_autograd("cells" in name, "boundary" in name, views)
    check_outcomes(outcomes, expected, views, PORTRAIT, replicated=replicated, sized=False)


@pytest.mark.parametrize(("name", "ranks", "mode"), STEPS)
def test_a_fused_step_equals_single(name: str, ranks: int, mode: str) -> None:
    check_fused(run_ranks(fused_step, ranks, name, mode), name)


def picture(world: World, strategy: str) -> list[Any]:
    """Return a view, as all ranks draw it for people to look at."""
    view = make_views(2, torch.float32, world.device, PORTRAIT)[0]
    spread = STRATEGIES[strategy](world)
    held, _ = held_at(spread, convexes(POINTS, torch.float32, world.device))
    kernels: Any = ALL.kernels(depth=True)
    _, drawn = Forward(spread).draw(kernels, held, view)
    return [(p.patch, torch.cat([p.color, p.alpha, p.depth], dim=-1).cpu()) for p in drawn if p.depth is not None]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("tile", 2)])
def test_a_picture_is_what_the_functions_render(strategy: str, ranks: int) -> None:
    view, points = make_views(2, torch.float32, size=PORTRAIT)[0], convexes(POINTS, torch.float32)
    spread = STRATEGIES["single"](World.single())
    with torch.no_grad():
        (expected,) = spread.render(ALL, points, [view], spread.plan([view])).pixels
    assert expected.depth is not None and float(expected.depth.std()) > 0.1
    whole = torch.cat([expected.color, expected.alpha, expected.depth], dim=-1)
    found = stitch([piece for parts in run_ranks(picture, ranks, strategy) for piece in parts])
    torch.testing.assert_close(found[0], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "ranks", "mode"), STEPS)
def test_a_fused_step_equals_single_on_gpus(name: str, ranks: int, mode: str) -> None:
    skip_without_gpus(ranks)
    check_fused(run_ranks(fused_step, ranks, name, mode, device="cuda"), name)


@pytest.mark.gpu
@pytest.mark.parametrize(("strategy", "size"), CASES)
def test_equals_single_on_gpus(strategy: str, size: int) -> None:
    skip_without_gpus(size)
    expected = step(World.single("cuda:0"), "single", 4, 120, torch.float32)
    outcomes = run_ranks(step, size, strategy, 4, 120, torch.float32, device="cuda")
    check(outcomes, expected, torch.float32)
