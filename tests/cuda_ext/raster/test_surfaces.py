"""2D Gaussians and 3D convexes: the references by finite differences, and the C++ twins by them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import cuda_ext
from cuda_ext.ops.raster.convexes import CONVEXES
from cuda_ext.ops.raster.primitives import box_lists
from cuda_ext.ops.raster.surfels import SURFELS
from tests.cuda_ext import convex_scene, surfel_scene
from tests.cuda_ext.scenes import lens_in_turn
from tests.cuda_ext.surface_scene import HEIGHT, WIDTH, whole
from tests.lib.threads import same_on_threads

pytestmark = pytest.mark.parametrize("kind", [surfel_scene, convex_scene], ids=["2dgs", "convex"])


def test_a_pixel_does_not_depend_on_its_patch(kind: Any) -> None:
    scene = kind.make_scene(grad=False)
    _, pixels = kind.draw(scene, [1, 0, 0, WIDTH, HEIGHT])
    _, part = kind.draw(scene, [1, 7, 5, 30, 29])
    for found, expected in zip(part, pixels, strict=True):
        cut = expected.view(HEIGHT, WIDTH, -1)[5:29, 7:30].reshape(found.shape)
        assert torch.equal(found, cut)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("count", "lenses"), [(0, False), (1, False), (40, False), (60, True)])
def test_the_twin_equals_the_reference(kind: Any, count: int, lenses: bool, dtype: torch.dtype) -> None:
    scene = kind.make_scene(count, 3 if lenses else 2, dtype=dtype, spread=1.2, lenses=lenses)
    rtol, atol = (1e-8, 1e-10) if dtype == torch.float64 else (2e-3, 2e-4)
    rows, pixels = kind.draw(scene)
    found = kind.gradients(scene)
    with cuda_ext.use_reference():
        expected_rows, expected = kind.draw(scene)
        wanted = kind.gradients(scene)
    assert count == 0 or float(pixels.alphas.detach().abs().sum()) > 1
    for group, others in ((rows, expected_rows), (pixels, expected)):
        for one, other in zip(group, others, strict=True):
            rounded = kind is convex_scene and one.dtype == torch.int32  # its radii are rounded up
            torch.testing.assert_close(one, other, rtol=rtol, atol=1 if rounded else atol)
    for one, other in zip(found, wanted, strict=True):
        scale = float(other.abs().max()) if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol * max(scale, 1.0))


def test_gradients_have_the_same_bits_on_any_number_of_threads(kind: Any) -> None:
    scene = kind.make_scene(40, dtype=torch.float32)
    same_on_threads(lambda: kind.gradients(scene))


@pytest.mark.parametrize("view", [None, 0, 1, 2])
def test_reference_by_finite_differences(kind: Any, view: int | None) -> None:
    scene = kind.make_scene(8, 1, spread=0.6, seed=5)
    if view is not None:  # the window's pixels are those of the pinhole camera
        lens = lens_in_turn(view, scene.Ks[0], (WIDTH, HEIGHT))
        lens[:2, :3] = scene.Ks[0, :2]
        scene = scene._replace(Ks=lens[None])

    def render(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with cuda_ext.use_reference():
            _, pixels = kind.draw(type(scene)(*floats, *scene[-3:]), [0, 14, 10, 24, 20])
        # The median's depth is that of one splat or another.
        return tuple(value.abs() if name == "alphas" else value for name, value in pixels._asdict().items())

    assert torch.autograd.gradcheck(render, scene[:-3], eps=1e-7, atol=1e-4, rtol=1e-3, fast_mode=True)


def test_operators_keep_their_promises(kind: Any) -> None:
    name, operators = "surfels" if kind is surfel_scene else "convexes", torch.ops.ns_multigpu
    scene = kind.make_scene(12, 1)
    cameras = (scene.viewmats, scene.Ks, [WIDTH, HEIGHT], scene.view_ids, scene.point_ids)
    torch.library.opcheck(getattr(operators, f"project_{name}"), (*scene[:-5], *cameras, 0.2, 1e10))
    rows = kind.project(scene)
    lists = box_lists(rows, scene.view_ids, whole(1))
    leaves = [x.detach().requires_grad_() for x in (*rows[:3], rows.row_opacities, scene.colors, rows.depths)]
    torch.library.opcheck(getattr(operators, f"rasterize_{name}"), (*leaves, *lists, whole(1), 16))


def test_bad_input_is_named(kind: Any) -> None:
    scene = kind.make_scene(12, 1, grad=False)
    name, width = ("scales", 2) if kind is surfel_scene else ("corners", 18)
    for backend in (nullcontext(), cuda_ext.use_reference()):  # which checks nothing itself
        with backend, pytest.raises(ValueError, match=rf"{name} must have the shape \[12, {width}\]"):
            kind.project(scene._replace(**{name: torch.ones(12, 6).double()}))
    for backend in (nullcontext(), cuda_ext.use_reference()):
        with backend, pytest.raises(ValueError, match=r"colors must have the shape \[12, 3\]"):
            kind.draw(scene._replace(colors=torch.ones(12, 4).double()))
    rows, operators = kind.project(scene), SURFELS if kind is surfel_scene else CONVEXES
    offsets, row_ids = box_lists(rows, scene.view_ids, whole(1))
    with pytest.raises(IndexError, match="take both from intersect"):
        operators.rasterize(rows, scene.colors, offsets, row_ids + 100, whole(1))
