"""The law: for every strategy, primitive and world size, pixels, loss and gradients of a batch equal `single`'s.

Adding a strategy or a primitive to its table below adds its test.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nerfstudio.cameras.camera_optimizers import CameraOptimizer

from cuda_ext.ops.loss.bilateral_map import bilateral_map
from cuda_ext.ops.optim.adam import mean_step
from ns_multigpu.core.dist.collectives import add_up, all_gather_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.step.bilateral_grids import VARIATION_WEIGHT, variation
from ns_multigpu.core.step.depth_loss import depth_loss
from ns_multigpu.core.step.exposures import drift
from ns_multigpu.core.step.loss import photometric_loss, sky_loss
from ns_multigpu.core.step.normal_map_loss import normal_map_loss
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import Patch, Pixels, Points, View
from ns_multigpu.plugin.model.cameras import world_to_camera
from ns_multigpu.primitives.convexes.functions import Convexes
from ns_multigpu.primitives.convexes.functions import screen_radii as convex_radii
from ns_multigpu.primitives.densify.densifier import densification_info
from ns_multigpu.primitives.gaussians.functions import Gaussians, screen_radii
from ns_multigpu.primitives.moving.functions import MovingGaussians
from ns_multigpu.primitives.surfels.functions import Surfels
from ns_multigpu.primitives.surfels.functions import screen_radii as surfel_radii
from ns_multigpu.primitives.surfels.losses import distortion_loss, normal_loss
from ns_multigpu.primitives.surfels.schema import CHANNELS
from strategies import STRATEGIES
from tests.lib.ranks import on_gpus, run_ranks
from tests.strategies.scene import (
    make_convexes,
    make_gains,
    make_grids,
    make_image,
    make_layers,
    make_moving_points,
    make_normals,
    make_observations,
    make_points,
    make_surfels,
    make_views,
    through_lenses,
)

PRIMITIVES: dict[str, Callable[[], Primitive]] = {
    "gaussians": lambda: Gaussians(sh_degree=3, depth=True),
    "gaussians, antialiased, absgrad": lambda: Gaussians(sh_degree=2, antialiased=True, absgrad=True),
    "gaussians, plain colours": lambda: Gaussians(sh_degree=None),
    "4D gaussians": lambda: MovingGaussians(sh_degree=3, depth=True),
}

SURFACES: dict[str, Callable[[], Primitive]] = {
    "2dgs": lambda: Surfels(sh_degree=2, depth=True),
    "2dgs, losses": lambda: Surfels(sh_degree=2, depth=True, channels=("normals", "distortion")),
    "2dgs, all channels": lambda: Surfels(sh_degree=3, depth=True, channels=CHANNELS),
    "2dgs, plain colours": lambda: Surfels(sh_degree=None, depth=True),
    "convex": lambda: Convexes(sh_degree=3, depth=True),
    "convex, faint": lambda: Convexes(sh_degree=3, depth=True),
}
"""Primitives that few strategies are tested with; of faint convexes no pixel is closed."""

# Forward and gradients: rounding of a changed order of summation, far inside KERNELS.md's tolerances for the operators.
TOLERANCES = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 2e-6}}

MACHINES = [(2, 2), (4, 2), (6, 3)]
"""Ranks, and the machines that they are on; one machine is what all other cases have."""
BY_CELLS = ["pixel"]
"""Strategies that blend cell by cell: `test_pixel` says what they equal."""
LIKE_SINGLE = [name for name in STRATEGIES if name not in ("single", *BY_CELLS)]
KNOW_MACHINES = ["locality"]
"""Strategies that ask which ranks are of one machine."""

DEPTH_WEIGHT, NORMAL_WEIGHT, SKY_WEIGHT = 0.2, 0.15, 0.1
"""Of the losses of depth, of normal maps and of the sky."""

Fragments = list[tuple[Patch, torch.Tensor]]
Outcome = dict[str, Any]


def one_step(
    world: World, strategy: str, primitive: str, views: int, points: int, dtype: torch.dtype,
    size: tuple[int, int] | None = None,
) -> Outcome:  # fmt: skip
    """Return `take_step` with a new strategy of that name."""
    return take_step(STRATEGIES[strategy](world), primitive, views, points, dtype, size)


def one_step_on(machines: int, world: World, *rest: Any) -> Outcome:
    """Return `one_step` with the ranks spread over so many machines."""
    return one_step(on_machines(world, machines), *rest)


def on_machines(world: World, machines: int) -> World:
    """Return the world as if its ranks were on so many machines. Only these ranks call it: they may be some of all."""
    each = world.size // machines
    first = world.rank // each * each
    group = dist.new_group(list(range(first, first + each)), use_local_synchronization=True)
    return replace(world, local_rank=world.rank % each, local_size=each, local_group=group)


def needle_terms(held: Points, needles: torch.Tensor | None = None, max_ratio: float = 1.0) -> list[torch.Tensor]:
    """Return the loss's term of needles, if any; of one rank, which holds all points. See `splat_update`."""
    if needles is None:
        return []
    scales = held.params["scales"].exp()
    return [needles[0] * (scales.amax(-1) / scales.amin(-1)).clamp(min=max_ratio).sum()]


def _statistics(
    drawn: Primitive, splats: Any, batch: Sequence[View], places: torch.Tensor, found: torch.Tensor
) -> torch.Tensor:
    """Add what densification counts to `found` [2, points]: gradients on the screen, and views that see a point."""
    if splats.probe is not None:  # else nothing is counted
        counted_by = {Surfels: surfel_radii, Convexes: convex_radii}.get(type(drawn), screen_radii)
        info = densification_info(splats, batch, counted_by)
        found[0].index_add_(0, places[info["ids"]], info["gradients"].float() * info["visible"])
        found[1].index_add_(0, places[info["ids"]], info["visible"])
    return found


def _geometry_loss(pixels: Pixels, view: View) -> torch.Tensor:
    """Return a patch's share of the losses of all channels, depth and normals that it and its view have."""
    loss = pixels.alpha.new_zeros(())
    if "distortion" in pixels.extra:
        loss = loss + normal_loss(pixels, view) + 0.1 * distortion_loss(pixels, view)
    if view.observations is not None:
        loss = loss + DEPTH_WEIGHT * depth_loss(pixels, view)
    if view.normals is not None:
        loss = loss + NORMAL_WEIGHT * normal_map_loss(pixels, view)
    return loss


def _supervised(batch: list[View], observes: bool, directs: bool) -> list[View]:
    """Return the views with observations of points, and with normal maps, where asked."""
    made_as = len(batch), batch[0].viewmat.dtype, batch[0].viewmat.device
    if observes:
        observed = make_observations(*made_as)
        batch = [replace(view, observations=observed.of(i)) for i, view in enumerate(batch)]
    if directs:
        normals = make_normals(*made_as)
        batch = [replace(view, normals=normals.of(i)) for i, view in enumerate(batch)]
    return batch


def take_step(
    spread: Strategy, primitive: str, views: int, points: int, dtype: torch.dtype, size: tuple[int, int] | None = None,
    kind: tuple[Primitive, Points] | None = None, observes: bool = False, directs: bool = False, exposes: bool = False,
    layered: bool = False, sky: bool = False, corrects: CameraOptimizer | None = None, grids: bool = False,
    lenses: bool = False, whole_step_scale: float = 0.0, **needles: Any,
) -> Outcome:  # fmt: skip
    """Render a batch, takes the loss of this rank's patches and exchanges gradients. Views have one size, if given.
    `kind`: a primitive that is not in the table, and so many points of it. `observes`: views observe points, whose
    depth counts. `directs`: they have normal maps. `exposes`, `grids`: their colours have gains, or bilateral grids.
    `layered`: photographs have alpha and masks; `sky`: also of the sky. `corrects`: the first two views are one, and
    poses are corrected. `lenses`: views have lenses. `whole_step_scale`: see `splat_update`. `needles`: see
    `needle_terms`."""
    world = spread.world
    drawn, whole = kind or points_of(primitive, points, dtype, world.device)
    made = make_views(views, dtype, world.device, size)
    batch = seen = through_lenses(made) if lenses else made
    spread.placement.look(lambda: seen)
    held, places = held_at(spread, whole)
    poses = [v.viewmat.clone().requires_grad_() for v in batch]
    if corrects is not None:
        batch = [replace(v, index=max(v.index - 1, 0)) for v in batch]
        poses = [corrected_by(corrects, v) for v in batch]
    batch = [replace(v, viewmat=p) for v, p in zip(batch, poses, strict=True)]
    batch = _supervised(batch, observes, directs)
    spread.observe(drawn, held, 0)
    plan = spread.plan(batch, holders=[(3 * i) % world.size for i in range(views)])
    rendering = spread.render(drawn, held, batch, plan)
    loss = sum((r.sum() * 0.0 for r in rendering.splats.rows.values() if r.requires_grad), start=torch.zeros(()))
    gains = make_gains(views, dtype, world.device).requires_grad_() if exposes else None
    maps = make_grids(views, dtype, world.device).requires_grad_() if grids else None
    images: Fragments = []
    depths: Fragments = []
    for pixels in rendering.pixels:
        view = batch[pixels.patch.view]
        rgb = pixels.color + (1 - pixels.alpha) * 0.3
        rgb = (rgb if gains is None else rgb * gains[view.index]).clamp(0, 1)
        if maps is not None:
            rgb = bilateral_map(maps[view.index], rgb, pixels.patch.rendered(view), (view.width, view.height))
        x0, y0, x1, y1 = pixels.patch.inner(view)
        images.append((pixels.patch, rgb.detach()[y0:y1, x0:x1].cpu()))
        if pixels.depth is not None:
            deep = [pixels.depth * (pixels.alpha > 0.01), *pixels.extra.values()]
            depths.append((pixels.patch, torch.cat(deep, -1).detach()[y0:y1, x0:x1].cpu()))
        left, top, right, bottom = pixels.patch.rendered(view)
        target = make_image(view).to(world.device)[top:bottom, left:right]
        if layered:
            layers = make_layers(view, sky).to(world.device, dtype)[top:bottom, left:right] / 255
            color, alpha, mask = layers[..., :3], layers[..., 3:4], layers[..., 4:5]
            rgb, target = rgb * mask, (alpha * color + (1 - alpha) * 0.3) * mask
            images[-1] = pixels.patch, rgb.detach()[y0:y1, x0:x1].cpu()
            if sky:
                loss = loss + SKY_WEIGHT * sky_loss(pixels.alpha, layers[..., 5:], pixels.patch, view) / len(batch)
        loss = loss + photometric_loss(rgb, target, pixels.patch, view, 0.2) / len(batch)
        loss = loss + _geometry_loss(pixels, view) / len(batch)
    of_views = {"exposures": gains, "grids": maps}
    trainable: dict[str, torch.Tensor] = {name: value for name, value in of_views.items() if value is not None}
    if corrects is not None:
        poses, trainable["corrections"] = [], corrects.pose_adjustment
    leaves = [*poses, *trainable.values(), *held.params.values()]
    spread.gradients.begin_backward(leaves)
    held_back = [] if gains is None else [drift(gains)]
    held_back += [] if maps is None else [VARIATION_WEIGHT * variation(maps)]
    held_back += needle_terms(held, **needles)
    if corrects is not None:
        held_back += penalties(corrects).values()
    sum((term / world.size for term in held_back), start=loss).backward()
    spread.gradients.end_backward()
    gradients = {name: _gradient(value) for name, value in held.params.items()}
    if whole_step_scale > 0:  # what the first moment gets
        gradients["means"] = gradients["means"] * mean_step(held.params["scales"], whole_step_scale)
    if not spread.placement.replicated:
        order = all_gather_rows(places, world)[0].argsort()
        gradients = {name: all_gather_rows(grad, world)[0][order] for name, grad in gradients.items()}
    statistics = _statistics(drawn, rendering.splats, batch, places, torch.zeros(2, points, device=world.device))
    return {
        "loss": add_up(loss.detach().reshape(1), world).cpu(),
        "images": images,
        "depths": depths,
        "statistics": add_up(statistics, world).cpu(),
        "gradients": {name: grad.cpu() for name, grad in gradients.items()},
        "poses": {name: _gradient(of).cpu() for name, of in [*enumerate(poses), *trainable.items()]},
    }


def corrected_by(optimizer: CameraOptimizer, view: View) -> torch.Tensor:
    """Return the view's matrix [4, 4] as ordinary steps correct it."""
    rotation, flip = view.viewmat[:3, :3].T, view.viewmat.new_tensor([1.0, -1.0, -1.0])
    there = torch.cat([rotation * flip, -rotation @ view.viewmat[:3, 3:]], dim=1)
    camera: Any = SimpleNamespace(
        camera_to_worlds=there[None], device=there.device, metadata={"cam_idx": view.index}
    )  # fmt: skip
    return world_to_camera(optimizer.apply_to_camera(camera)[0])


def penalties(optimizer: CameraOptimizer) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()
    optimizer.get_loss_dict(found)
    return found


def points_of(
    primitive: str, count: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Primitive, Points]:
    """Return a primitive of the tables, and so many points of its kind."""
    drawn = (PRIMITIVES | SURFACES)[primitive]()
    makers: Any = {MovingGaussians: make_moving_points, Surfels: make_surfels, Convexes: make_convexes}
    points = makers.get(type(drawn), make_points)(count, dtype, device)
    if "faint" in primitive:
        points.params["opacities"].data.sub_(3.0)
    return drawn, points


def held_at(spread: Strategy, whole: Points) -> tuple[Points, torch.Tensor]:
    """This rank's points of a whole model, and their places [N] int64 there."""
    numbers = torch.arange(len(whole), device=spread.world.device)
    numbered = Points({**whole.params, "number": numbers[:, None].double()})
    held = dict(spread.placement.hold(numbered, spread.world).params)
    places = held.pop("number")[:, 0].long()
    return Points(held), places


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    """No gradient means zero."""
    return torch.zeros_like(leaf).detach() if leaf.grad is None else leaf.grad


def stitch(fragments: Fragments) -> dict[int, torch.Tensor]:
    """Return the images that the patches are of, each of which must be covered, and no pixel twice."""
    images: dict[int, torch.Tensor] = {}
    for view in {patch.view for patch, _ in fragments}:
        of_view = [(patch, piece) for patch, piece in fragments if patch.view == view]
        width, height = max(patch.x1 for patch, _ in of_view), max(patch.y1 for patch, _ in of_view)
        covered = torch.zeros(height, width, dtype=torch.int32)
        images[view] = of_view[0][1].new_zeros(height, width, of_view[0][1].shape[-1])
        for patch, piece in of_view:
            covered[patch.y0 : patch.y1, patch.x0 : patch.x1] += 1
            images[view][patch.y0 : patch.y1, patch.x0 : patch.x1] = piece
        assert bool((covered == 1).all()), f"view {view}: {of_view}"
    return images


def check(outcomes: list[Outcome], expected: Outcome, dtype: torch.dtype) -> None:
    """Return whether the ranks together produced what one rank did."""
    close = TOLERANCES[dtype]
    for kind in ("images", "depths"):
        seen = stitch([piece for outcome in outcomes for piece in outcome[kind]])
        wanted = stitch(expected[kind])
        assert seen.keys() == wanted.keys()
        for view, image in wanted.items():
            torch.testing.assert_close(seen[view], image, **close)
    for outcome in outcomes:
        torch.testing.assert_close(outcome["loss"], expected["loss"], **close)
        torch.testing.assert_close(outcome["statistics"], expected["statistics"], rtol=3e-4, atol=2e-5)
        for group in ("gradients", "poses"):
            for name, gradient in expected[group].items():
                scale = float(gradient.abs().max()) if gradient.numel() else 1.0
                torch.testing.assert_close(
                    outcome[group][name], gradient, rtol=close["rtol"], atol=close["atol"] * max(scale, 1e-3) * 40
                )


@pytest.mark.parametrize("primitive", PRIMITIVES)
@pytest.mark.parametrize(("size", "device"), [(1, "cpu"), (2, "cpu"), (3, "cpu"), *map(on_gpus, (1, 2, 3, 4))])
@pytest.mark.parametrize("strategy", LIKE_SINGLE)
def test_equals_single(strategy: str, size: int, primitive: str, device: str) -> None:
    in_double = device == "cpu" and primitive in ("gaussians", "4D gaussians")
    dtype = torch.float64 if in_double else torch.float32
    expected = one_step(World.single("cuda:0" if device == "cuda" else device), "single", primitive, 5, 150, dtype)
    # The scene must be able to show a difference.
    assert sum(float(image.std()) > 0.02 for image in stitch(expected["images"]).values()) >= 4
    unused = {"features_rest"} if "plain" in primitive else set()
    assert all(float(g.abs().sum()) > 0 for name, g in expected["gradients"].items() if name not in unused)
    check(run_ranks(one_step, size, strategy, primitive, 5, 150, dtype, device=device), expected, dtype)


@pytest.mark.parametrize(("ranks", "machines"), MACHINES)
@pytest.mark.parametrize("strategy", KNOW_MACHINES)
def test_equals_single_over_machines(strategy: str, ranks: int, machines: int) -> None:
    expected = one_step(World.single(), "single", "gaussians", 5, 150, torch.float64)
    step = partial(one_step_on, machines)
    check(run_ranks(step, ranks, strategy, "gaussians", 5, 150, torch.float64), expected, torch.float64)


@pytest.mark.parametrize(("views", "points"), [(2, 40), (1, 0), (3, 1)])
@pytest.mark.parametrize("strategy", LIKE_SINGLE)
def test_ranks_without_views_and_models_without_points(strategy: str, views: int, points: int) -> None:
    expected = one_step(World.single(), "single", "gaussians", views, points, torch.float64)
    check(run_ranks(one_step, 3, strategy, "gaussians", views, points, torch.float64), expected, torch.float64)


@pytest.mark.parametrize("strategy", LIKE_SINGLE)
def test_ranks_without_pixels_of_an_uncut_view(strategy: str) -> None:
    """One row of tiles: a rank has all of it, without a halo, and the others take part in the exchange."""
    expected = one_step(World.single(), "single", "gaussians", 1, 60, torch.float64, (40, 14))
    check(run_ranks(one_step, 3, strategy, "gaussians", 1, 60, torch.float64, (40, 14)), expected, torch.float64)
