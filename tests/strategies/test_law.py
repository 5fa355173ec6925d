"""The law: for every strategy, primitive and world size, pixels, loss and gradients of a batch equal `single`'s.

Adding a strategy or a primitive to its table below adds its test.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ns_multigpu.core.collectives import sum_all
from ns_multigpu.core.loss import photometric_loss
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.types import Points
from ns_multigpu.core.world import World
from ns_multigpu.primitives.densifier import densification_info
from ns_multigpu.primitives.gaussians import Gaussians
from strategies import STRATEGIES
from tests.ranks import run_ranks
from tests.strategies.scene import make_image, make_points, make_views

PRIMITIVES: dict[str, Callable[[], Primitive]] = {
    "gaussians": lambda: Gaussians(sh_degree=3, depth=True),
    "gaussians, antialiased, absgrad": lambda: Gaussians(sh_degree=2, antialiased=True, absgrad=True),
    "gaussians, plain colours": lambda: Gaussians(sh_degree=None),
}

# Forward and gradients: rounding of a changed order of summation, far inside KERNELS.md's tolerances for the operators.
TOLERANCES = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 2e-6}}

Outcome = dict[str, torch.Tensor | dict[str, torch.Tensor] | dict[int, torch.Tensor]]


def one_step(world: World, strategy: str, primitive: str, views: int, points: int, dtype: torch.dtype) -> Outcome:
    """Renders a batch, takes the loss of this rank's patches and exchanges gradients."""
    kind = PRIMITIVES[primitive]()
    spread = STRATEGIES[strategy](world)
    held: Points = make_points(points, dtype, world.device)
    batch = make_views(views, dtype, world.device)
    poses = [v.viewmat.clone().requires_grad_() for v in batch]
    batch = [replace(v, viewmat=p) for v, p in zip(batch, poses, strict=True)]
    plan = spread.plan(batch, holders=[(3 * i) % world.size for i in range(views)])
    rendering = spread.render(kind, held, batch, plan)
    loss = sum((r.sum() * 0.0 for r in rendering.splats.rows.values() if r.requires_grad), start=torch.zeros(()))
    images: dict[int, torch.Tensor] = {}
    depths: dict[int, torch.Tensor] = {}
    for pixels in rendering.pixels:
        view = batch[pixels.patch.view]
        rgb = (pixels.color + (1 - pixels.alpha) * 0.3).clamp(0, 1)
        images[pixels.patch.view] = rgb.detach().cpu()
        if pixels.depth is not None:
            depths[pixels.patch.view] = (pixels.depth * (pixels.alpha > 0.01)).detach().cpu()
        target = make_image(view).to(world.device)
        loss = loss + photometric_loss(rgb, target, pixels.patch, view, 0.2) / len(batch)
    leaves = [*poses, *held.params.values()]
    spread.exchange.begin_backward(leaves)
    loss.backward()
    spread.exchange.end_backward()
    info = densification_info(rendering.splats, batch)
    statistics = torch.zeros(2, points, device=world.device)
    statistics[0].index_add_(0, info["ids"], info["gradients"].float() * info["visible"])
    statistics[1].index_add_(0, info["ids"], info["visible"])
    return {
        "loss": sum_all(loss.detach().reshape(1), world).cpu(),
        "images": images,
        "depths": depths,
        "statistics": sum_all(statistics, world).cpu(),
        "gradients": {name: _gradient(value) for name, value in held.params.items()},
        "poses": {str(i): _gradient(pose) for i, pose in enumerate(poses)},
    }


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    """No gradient means zero."""
    return torch.zeros_like(leaf).detach().cpu() if leaf.grad is None else leaf.grad.cpu()


def check(outcomes: list[Outcome], expected: Outcome, dtype: torch.dtype) -> None:
    """Whether the ranks together produced what one rank did."""
    close = TOLERANCES[dtype]
    for kind in ("images", "depths"):
        seen: dict[int, torch.Tensor] = {}
        for outcome in outcomes:
            seen.update(outcome[kind])
        assert seen.keys() == expected[kind].keys()
        for view, image in expected[kind].items():
            torch.testing.assert_close(seen[view], image, **close)
    for outcome in outcomes:
        torch.testing.assert_close(outcome["loss"], expected["loss"], **close)
        torch.testing.assert_close(outcome["statistics"], expected["statistics"], rtol=1e-4, atol=1e-5)
        for group in ("gradients", "poses"):
            for name, gradient in expected[group].items():
                scale = float(gradient.abs().max()) if gradient.numel() else 1.0
                torch.testing.assert_close(
                    outcome[group][name], gradient, rtol=close["rtol"], atol=close["atol"] * max(scale, 1e-3) * 10
                )


@pytest.mark.parametrize("primitive", PRIMITIVES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_equals_single(strategy: str, size: int, primitive: str) -> None:
    dtype = torch.float64 if primitive == "gaussians" else torch.float32
    expected = one_step(World.single(), "single", primitive, 5, 150, dtype)
    # The scene must be able to show a difference.
    assert sum(float(image.std()) > 0.02 for image in expected["images"].values()) >= 4
    unused = {"features_rest"} if "plain" in primitive else set()
    assert all(float(g.abs().sum()) > 0 for name, g in expected["gradients"].items() if name not in unused)
    check(run_ranks(one_step, size, strategy, primitive, 5, 150, dtype), expected, dtype)


@pytest.mark.parametrize(("views", "points"), [(2, 40), (1, 0), (3, 1)])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_ranks_without_views_and_models_without_points(strategy: str, views: int, points: int) -> None:
    expected = one_step(World.single(), "single", "gaussians", views, points, torch.float64)
    check(run_ranks(one_step, 3, strategy, "gaussians", views, points, torch.float64), expected, torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("primitive", PRIMITIVES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_equals_single_on_gpus(strategy: str, size: int, primitive: str) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs needed, {torch.cuda.device_count()} here")
    expected = one_step(World.single("cuda:0"), "single", primitive, 5, 150, torch.float32)
    outcomes = run_ranks(one_step, size, strategy, primitive, 5, 150, torch.float32, device="cuda")
    check(outcomes, expected, torch.float32)
