"""2D Gaussians and 3D convexes: the C++ twins by the references, on any patch and any number of threads."""

from typing import Any

import pytest
import torch

import cuda_ext
from tests.cuda_ext import convex_scene, surfel_scene
from tests.cuda_ext.surface_scene import HEIGHT, WIDTH

pytestmark = pytest.mark.parametrize("kind", [surfel_scene, convex_scene], ids=["2dgs", "convex"])


def test_a_pixel_does_not_depend_on_its_patch(kind: Any) -> None:
    scene = kind.make_scene(grad=False)
    _, pixels = kind.draw(scene, [1, 0, 0, WIDTH, HEIGHT])
    _, part = kind.draw(scene, [1, 7, 5, 30, 29])
    for found, expected in zip(part, pixels, strict=True):
        cut = expected.view(HEIGHT, WIDTH, -1)[5:29, 7:30].reshape(found.shape)
        assert torch.equal(found, cut)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_the_twin_equals_the_reference(kind: Any, count: int, dtype: torch.dtype) -> None:
    scene = kind.make_scene(count, dtype=dtype, spread=1.2)
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
    scene, before = kind.make_scene(40, dtype=torch.float32), torch.get_num_threads()
    found: list[Any] = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(kind.gradients(scene))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
