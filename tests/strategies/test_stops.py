"""Cells that stop early: what is behind a solid cell is not seen, as in `single`."""

from typing import Any

import pytest
import torch

from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.tree import Split
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import Points
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies import STRATEGIES
from strategies.pixel import pixel
from tests.lib.ranks import run_ranks
from tests.strategies import test_law, test_law_steps
from tests.strategies.scene import make_points
from tests.strategies.test_law import PRIMITIVES, Outcome, check, stitch, take_step
from tests.strategies.test_law_steps import CUT, KERNELS, PORTRAIT, take_one
from tests.strategies.test_pixel import with_splits

VIEWS, SIZE = 2, (60, 44)
"""Of `scene.make_views`, of which the first looks along x: the wall in cell 2 hides what is in the others."""


def walls(dtype: torch.dtype) -> Points:
    """Three solid walls across x, each in a cell of its own, of colours that differ much."""
    side = torch.linspace(-1.5, 1.5, 6, dtype=dtype)
    means = torch.cartesian_prod(torch.tensor([-0.8, 0.0, 0.8], dtype=dtype), side, side)
    count = len(means)
    scales = torch.tensor([0.02, 0.7, 0.7], dtype=dtype).log().expand(count, 3)
    wall = torch.arange(count) // 36
    colors = torch.tensor([[1.5, -1.5, -1.5], [-1.5, 1.5, -1.5], [-1.5, -1.5, 1.5]], dtype=dtype)[wall]
    params = {
        "means": means, "quats": torch.tensor([1.0, 0, 0, 0], dtype=dtype).expand(count, 4), "scales": scales,
        "opacities": torch.full((count, 1), 9.0, dtype=dtype), "features_dc": colors,
        "features_rest": torch.zeros(count, 15, 3, dtype=dtype),
    }  # fmt: skip
    return Points({name: value.clone().requires_grad_() for name, value in params.items()})


def step(world: World, strategy: str, **options: Any) -> Outcome:
    planes = (Split(0, -0.4, -1, 1), Split(0, 0.4, -2, -3))
    spread: Strategy = with_splits(world, planes) if strategy == "pixel" else STRATEGIES[strategy](world)
    kind = Gaussians(depth=True), walls(torch.float64)
    return take_step(spread, "", VIEWS, 108, torch.float64, SIZE, kind=kind, **options)


def test_nothing_shines_through_a_cell_that_stopped() -> None:
    found, wanted = step(World.single(), "pixel"), step(World.single(), "single")
    images = stitch(found["images"]), stitch(wanted["images"])
    covered = [image for image in images[1].values() if float(image.std()) > 0.01]
    assert covered
    worst = max(float((images[0][view] - image).abs().max()) for view, image in images[1].items())
    assert worst < 1e-4, "the next wall would add hundredths"


def solid(*given: Any) -> Points:
    """Return the scene's points, but most of them opaque."""
    params = dict(make_points(*given).params)
    opacities = (params["opacities"].detach() + 4).requires_grad_()
    return Points({**params, "opacities": opacities})


def test_a_step_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what stopped the sign of alpha is no part of its gradient, in a fused step and through autograd."""
    for module in (test_law, test_law_steps):
        monkeypatch.setattr(module, "make_points", solid)
    primitive, spread = KERNELS[0], pixel(World.single(), PixelOptions(cells=3, crossing="none"))
    kind = PRIMITIVES[primitive]()
    assert isinstance(kind, Gaussians)
    found = take_one(spread, kind, CUT, PORTRAIT, "step")
    spread = pixel(World.single(), PixelOptions(cells=3, crossing="none"))
    wanted = take_step(spread, primitive, CUT, 150, torch.float32, PORTRAIT)
    for name, gradient in wanted["gradients"].items():
        there = torch.zeros_like(gradient)
        there[found["places"]] = found["gradients"][name].view(gradient.shape)
        assert float((there - gradient).norm() / gradient.norm()) < 1e-3, name


def test_stops_are_equal_on_all_ranks() -> None:
    expected = step(World.single(), "pixel")
    check(run_ranks(step, 3, "pixel"), expected, torch.float64)
