"""The CUDA kernels of 2D Gaussians and of 3D convexes against their C++ twins."""

from typing import Any

import pytest
import torch

from tests.cuda_ext import convex_scene, surfel_scene
from tests.cuda_ext.graphs import OUR_KERNELS
from tests.cuda_ext.surface_scene import HEIGHT, WIDTH, whole

pytestmark = [*OUR_KERNELS, pytest.mark.parametrize("kind", [surfel_scene, convex_scene], ids=["2dgs", "convex"])]


def on_gpu(scene: Any) -> Any:
    moved = [value.detach().cuda().requires_grad_() for value in scene[:-3]]
    return type(scene)(*moved, *(value.cuda() for value in scene[len(moved) :]))


PATCHES: list[Any] = [None, [1, 7, 5, 30, 29, 0, 0, 0, 41, 3], [0, 3, 3, 3, 3], []]


@pytest.mark.parametrize("patches", PATCHES)
@pytest.mark.parametrize(("count", "lenses"), [(0, False), (1, False), (40, False), (600, False), (300, True)])
def test_forward_and_gradients_are_the_twins(kind: Any, count: int, lenses: bool, patches: list[int] | None) -> None:
    scene = kind.make_scene(count, 3 if lenses else 2, dtype=torch.float32, spread=1.2, lenses=lenses)
    there = on_gpu(scene)
    for group, others in zip(kind.draw(there, patches), kind.draw(scene, patches), strict=True):
        for found, expected in zip(group, others, strict=True):
            found = found.detach().cpu()
            # A pixel is closed before one splat or the next. The median is one splat's depth or the next one's, where
            # alpha is one half to rounding. Radii of convexes are rounded up.
            slack = 1 if kind is convex_scene and not expected.dtype.is_floating_point else 1e-3
            apart = (found - expected.detach()).abs() > slack + 1e-3 * expected.detach().abs()
            assert float(apart.double().mean() if apart.numel() else 0.0) < 2e-3
    for found, expected in zip(kind.gradients(there, patches), kind.gradients(scene, patches), strict=True):
        scale = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-3)
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=5e-3 * scale)


def test_more_patches_than_one_launch_takes(kind: Any) -> None:
    scene = on_gpu(kind.make_scene(40, dtype=torch.float32))
    strips = [n for y in range(HEIGHT) for x in range(0, WIDTH, 11) for n in (1, x, y, min(x + 11, WIDTH), y + 1)]
    _, cut = kind.draw(scene, strips)
    _, pixels = kind.draw(scene, [1, 0, 0, WIDTH, HEIGHT])
    for found, expected in zip(cut, pixels, strict=True):
        pixels = found.view(HEIGHT, WIDTH, -1)  # a line's strips follow each other
        assert torch.equal(pixels, expected.view(HEIGHT, WIDTH, -1))


def test_more_views_than_one_launch_takes(kind: Any) -> None:
    here = kind.make_scene(9, 70, dtype=torch.float32)
    scene = on_gpu(here)
    assert kind.draw(scene, whole(1))[0].radii.shape == (630, 2)
    for one, other in zip(kind.gradients(scene, whole(70)), kind.gradients(here, whole(70)), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-2, atol=5e-3 * float(other.abs().max()))
