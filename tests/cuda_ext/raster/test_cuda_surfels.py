"""The CUDA kernels of 2D Gaussians against their C++ twin."""

from typing import Any

import pytest
import torch

from cuda_ext.dispatch import cuda as dispatch
from tests.cuda_ext.surfel_scene import HEIGHT, WIDTH, Scene, draw, gradients, make_scene, whole
from tests.lib.ranks import skip_without_gpus

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def our_kernels() -> None:
    skip_without_gpus(1)
    if dispatch.mode() != "native":
        pytest.skip("gsplat's kernels serve, which know no 2D Gaussians here")


def on_gpu(scene: Scene) -> Scene:
    moved = [value.detach().cuda().requires_grad_() for value in scene.floats]
    return Scene(*moved, *(value.cuda() for value in scene[6:]))


PATCHES: list[Any] = [None, [1, 7, 5, 30, 29, 0, 0, 0, 41, 3], [0, 3, 3, 3, 3], []]


@pytest.mark.parametrize("patches", PATCHES)
@pytest.mark.parametrize("count", [0, 1, 40, 600])
def test_forward_and_gradients_are_the_twins(count: int, patches: list[int] | None) -> None:
    scene = make_scene(count, dtype=torch.float32, spread=1.2)
    there = on_gpu(scene)
    for group, others in zip(draw(there, patches), draw(scene, patches), strict=True):
        for found, expected in zip(group, others, strict=True):
            found = found.detach().cpu()
            # The median is one splat's depth or the next one's, where alpha is one half to rounding.
            apart = (found - expected.detach()).abs() > 1e-3 + 1e-3 * expected.detach().abs()
            assert float(apart.double().mean() if apart.numel() else 0.0) < 2e-3
    for found, expected in zip(gradients(there, patches), gradients(scene, patches), strict=True):
        scale = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-3)
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=5e-3 * scale)


def test_more_patches_than_one_launch_takes() -> None:
    scene = on_gpu(make_scene(40, dtype=torch.float32))
    strips = [n for y in range(HEIGHT) for x in range(0, WIDTH, 11) for n in (1, x, y, min(x + 11, WIDTH), y + 1)]
    _, cut = draw(scene, strips)
    _, pixels = draw(scene, [1, 0, 0, WIDTH, HEIGHT])
    for found, expected in zip(cut, pixels, strict=True):
        pixels = found.view(HEIGHT, WIDTH, -1)  # a line's strips follow each other
        assert torch.equal(pixels, expected.view(HEIGHT, WIDTH, -1))


def test_more_views_than_one_launch_takes() -> None:
    scene = on_gpu(make_scene(9, 70, dtype=torch.float32))
    assert draw(scene, whole(1))[0].radii.shape == (630, 2)
    found, expected = gradients(scene, whole(70)), gradients(make_scene(9, 70, dtype=torch.float32), whole(70))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-2, atol=5e-3 * float(other.abs().max()))
