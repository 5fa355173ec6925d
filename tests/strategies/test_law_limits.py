"""The law with a far plane and a radius clip: what is drawn is what lies within both, on any ranks and in any step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Patch, Points
from ns_multigpu.primitives.registry import PRIMITIVES, RenderOptions
from strategies import STRATEGIES
from tests.lib.ranks import on_gpus, run_ranks
from tests.strategies.scene import make_convexes, make_moving_points, make_points, make_surfels, make_views
from tests.strategies.test_law import Outcome, check, on_machines, take_step
from tests.strategies.test_law_steps import POINTS, PORTRAIT, check_outcomes, count_of, take_one

FAR, CLIP = 3.3, 5.0
"""World units and pixels: each leaves out a part of what views see."""
POINTS_OF: dict[str, Callable[..., Points]] = {
    "3dgs": make_points, "2dgs": make_surfels, "4dgs": make_moving_points, "convex": make_convexes,
}  # fmt: skip


def kind_of(primitive: str, far: float = FAR, clip: float = CLIP) -> Any:
    return PRIMITIVES[primitive].make(RenderOptions(2, depth=True, far=far, radius_clip=clip))


def autograd_step(world: World, strategy: str, primitive: str, views: int = 5, size: Any = None) -> Outcome:
    made = POINTS_OF[primitive](POINTS, torch.float32, world.device)
    return take_step(STRATEGIES[strategy](world), "", views, POINTS, torch.float32, size, (kind_of(primitive), made))


def fused_step(world: World, strategy: str, primitive: str, mode: str, machines: int = 1) -> Outcome:
    world = on_machines(world, machines) if machines > 1 else world
    whole = POINTS_OF[primitive](POINTS, torch.float32, world.device)
    spread, count, by_sort = STRATEGIES[strategy](world), count_of(strategy), mode == "sort"
    mode = "step" if by_sort else mode
    return take_one(spread, kind_of(primitive), count, PORTRAIT, mode, by_sort, whole=whole)


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_what_is_beyond_a_limit_is_not_drawn(primitive: str) -> None:
    """An image with limits is one without them, of those points alone that are within."""
    points, view = POINTS_OF[primitive](POINTS, torch.float64), make_views(3, torch.float64)[0]
    limited, free = kind_of(primitive), kind_of(primitive, 1e10, 0.0)

    def drawn(kind: Any, some: Points) -> tuple[Any, torch.Tensor]:
        splats = kind.splat(some, kind.cull(some, [view], [0]), [view])
        return splats, kind.render(splats, [Patch.whole(0, view)], [view])[0].color

    splats, everything = drawn(free, points)
    near, large = splats.rows["depths"] <= FAR, (splats.rows["radii"] > CLIP).any(-1)
    visible = (splats.rows["radii"] > 0).all(-1)
    assert int((visible & near & ~large).sum()) > 3 and int((visible & ~near & large).sum()) > 3
    rows = splats.hits.point_ids[visible & near & large].long()
    within = Points({name: value.detach()[rows] for name, value in points.params.items()})
    found = drawn(limited, points)[1]
    torch.testing.assert_close(found, drawn(free, within)[1])
    assert float((found - everything).abs().max()) > 0.05


FIRST = {"cpu": "cpu", "cuda": "cuda:0"}
ORDINARY = [("locality", 2, "3dgs"), ("tile", 3, "convex"), ("pixel", 2, "2dgs"), ("batch", 2, "4dgs")]
FUSED = [
    ("single", 1, "4dgs", "step", 1), ("single", 1, "convex", "step", 1), ("locality", 4, "3dgs", "captured", 2),
    ("tile", 2, "2dgs", "captured", 1), ("pixel", 2, "3dgs", "captured", 1), ("batch", 2, "3dgs", "several", 1),
    ("tile", 3, "3dgs", "sort", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "ranks", "primitive", "device"),
    [*((*row, "cpu") for row in ORDINARY), *(on_gpus(*row) for row in ORDINARY)],
)
def test_ordinary_steps_equal_single(strategy: str, ranks: int, primitive: str, device: str) -> None:
    expected = autograd_step(World.single(FIRST[device]), "single", primitive)
    check(run_ranks(autograd_step, ranks, strategy, primitive, device=device), expected, torch.float32)


@pytest.mark.parametrize(
    ("strategy", "ranks", "primitive", "mode", "machines", "device"),
    [*((*row, "cpu") for row in FUSED), *(on_gpus(*row) for row in FUSED)],
)
def test_fused_steps_equal_single(
    strategy: str, ranks: int, primitive: str, mode: str, machines: int, device: str
) -> None:
    outcomes = run_ranks(fused_step, ranks, strategy, primitive, mode, machines, device=device)
    views = count_of(strategy)
    expected = autograd_step(World.single(FIRST[device]), "single", primitive, views, PORTRAIT)
    replicated = STRATEGIES[strategy](World.single()).placement.replicated
    sized = primitive != "convex"
    check_outcomes(outcomes, expected, views, PORTRAIT, replicated=replicated, sized=sized)


def test_squares_of_3_sigma_count_by_their_magnitude() -> None:
    """Their radii are negative: densification counts such splats, which are too faint to draw."""
    points, views = make_points(POINTS, torch.float32), make_views(3, torch.float32)
    faint = Points({**points.params, "opacities": points.params["opacities"] - 9})
    kind = kind_of("3dgs", 1e10, 0.0)
    hits = kind.cull(faint, views, range(3))
    plain, few, small = (
        replace(kind, radius_clip=clip).splat(faint, hits, views).rows["radii"] for clip in (0.0, 1e-6, CLIP)
    )
    assert int(plain.min()) < -CLIP and torch.equal(plain, few)
    assert torch.equal(small, torch.where((plain.abs() <= CLIP).all(-1, keepdim=True), 0, plain))
