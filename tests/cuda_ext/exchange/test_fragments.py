"""Pieces of pixels: gathered, composited front to back, and the way back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext import (
    composite_fragments,
    composite_fragments_backward,
    gather_fragments,
    live_boxes,
    scatter_fragments,
    use_reference,
)
from cuda_ext.reference.fragments import NOWHERE
from tests.cuda_ext.graphs import captured
from tests.lib.threads import same_on_threads

pytestmark = pytest.mark.usefixtures("native")
OPS = torch.ops.ns_multigpu
SIZES = [7, 5, 4, 3, 6, 2]  # of the last patch nothing is drawn
LAYERS = [0, 1, 0, 7, 4, 0, 0, 0, 0, 1, 5, 5, 24, 24, 0, 0, 0, 7, 5, 44, -1, 1, 0, 0, 4, 3, 79, 44]
"""Three layers of the first patch, that overlap and leave a pixel free, of which the last has no gradient; one."""
ROWS, BACK, PIXELS = 91, 56, 59


def received(channels: int = 3, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    """Every third pixel stopped."""
    g = torch.Generator().manual_seed(channels)
    given = torch.rand(ROWS, channels + 1, generator=g, dtype=torch.float64)
    given[::3, channels] *= -1
    return given.to(device, dtype)


def pixel_by_pixel(given: Tensor) -> tuple[Tensor, Tensor]:
    """Colours and alphas by the definition, in a form that autograd goes through."""
    colors, alphas = [], []
    for patch in range(3):
        width, height = SIZES[2 * patch : 2 * patch + 2]
        for y in range(height):
            for x in range(width):
                color, through = given.new_zeros(given.shape[1] - 1), given.new_ones(())
                for k in range(0, len(LAYERS), 7):
                    of, x0, y0, x1, y1, first, _ = LAYERS[k : k + 7]
                    if of == patch and x0 <= x < x1 and y0 <= y < y1:
                        pixel = given[first + (y - y0) * (x1 - x0) + x - x0]
                        color = color + through * pixel[:-1]
                        through = through * (1 - pixel[-1].abs())
                        if pixel[-1] < 0:  # nothing behind is seen
                            break
                colors.append(color)
                alphas.append(1 - through)
    return torch.stack(colors), torch.stack(alphas)


@pytest.mark.parametrize("channels", [3, 4])
def test_layers_are_composited_front_to_back(channels: int) -> None:
    given = received(channels)
    out, alpha, before = composite_fragments(given, LAYERS, SIZES)
    wanted = pixel_by_pixel(given)
    torch.testing.assert_close(out, wanted[0])
    torch.testing.assert_close(alpha, wanted[1])
    assert bool((out[-12:] == 0).all() and (alpha[-12:] == 0).all()), "of a patch without layers"
    assert bool((before[:24] == 1).all()) and float(before[44:79].min()) == 0.0
    assert 0 < float(before[44:79][before[44:79] > 0].min()) < 0.1
    in_both = before[24 + 0]  # the pixel (0, 1) of the second layer lies behind none
    assert float(in_both) == 1.0


def test_gradients_are_autograds() -> None:
    given = received().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: composite_fragments(x, LAYERS, SIZES)[:2], (given,))
    v = [torch.randn_like(x) for x in pixel_by_pixel(given)]
    expected = torch.autograd.grad(pixel_by_pixel(given), given, v)[0]
    found = torch.autograd.grad(composite_fragments(given, LAYERS, SIZES)[:2], given, v)[0]
    torch.testing.assert_close(found, expected)
    before = composite_fragments(given.detach(), LAYERS, SIZES)[2]
    some = composite_fragments_backward(given.detach(), before, v[0], v[1], LAYERS, SIZES, BACK)
    torch.testing.assert_close(some, torch.cat([expected[:44], expected[79:]]))


FRAGMENTS = [9, 7, 3, 2, 0, 6, 35, 4, 4, 3, 6, -1, 0, 7, 2, 1, 18, 0]
"""Within the first patch; all of the second, without gradients; the first pixels."""


def test_gather_and_scatter_are_inverse() -> None:
    color, alpha = torch.arange(177.0).view(59, 3), torch.arange(59.0) / 100
    out = torch.full((20, 4), -1.0)
    gather_fragments(color, alpha, FRAGMENTS, out)
    rows = [9, 10, 11, 16, 17, 18, *range(35, 47), 0, 1]
    assert torch.equal(out, torch.cat([color, alpha[:, None]], 1)[rows])
    v_color, v_alpha, gradients = torch.zeros(59, 3), torch.zeros(59), torch.randn(12, 4)
    numbers = [n if k != 17 else 6 for k, n in enumerate(FRAGMENTS)]
    numbers[5] = 0
    scatter_fragments(gradients, numbers, v_color, v_alpha)
    assert torch.equal(v_color[rows[:6]], gradients[:6, :3]) and torch.equal(v_alpha[[0, 1]], gradients[6:8, 3])
    assert int((v_alpha != 0).sum()) == 8


@pytest.mark.usefixtures("native")
def test_opcheck() -> None:
    given = received().requires_grad_()
    torch.library.opcheck(OPS.composite_fragments.default, (given, LAYERS, SIZES))
    v = torch.rand(PIXELS, 3).double(), torch.rand(PIXELS).double()
    rest = (received()[:, 0].contiguous(), *v, LAYERS, SIZES, BACK)
    torch.library.opcheck(OPS.composite_fragments_backward.default, (given.detach(), *rest))
    torch.library.opcheck(
        OPS.gather_fragments.default, (torch.rand(59, 3), torch.rand(59), FRAGMENTS, torch.zeros(20, 4))
    )
    numbers = [n if k != 17 else 6 for k, n in enumerate(FRAGMENTS)]
    given_back = torch.rand(20, 4), numbers, torch.zeros(59, 3), torch.zeros(59)
    torch.library.opcheck(OPS.scatter_fragments.default, given_back)


WATCHED = [0, 0, 5, 3, 4, 3, 0, 20, 9, 3, 2, 2, 2, 30, 0, 0, 3, 3]


def test_boxes_around_what_gets_enough() -> None:
    """Two pieces of one slot, one of another that gets too little, and a slot without any."""
    before = torch.zeros(40)
    before[[6, 11, 23]] = torch.tensor([0.5, 1e-4, 2e-4])  # (7, 4) and (8, 5) of the first, (10, 4) of the second
    before[30:39] = 9e-5
    found = live_boxes(before, WATCHED, 3, 1e-4)
    assert found.tolist() == [[-7, -4, 11, 6, 3], [NOWHERE] * 4 + [0], [NOWHERE] * 4 + [0]]
    assert live_boxes(before, [], 2, 1e-4)[:, 4].tolist() == [0, 0]
    torch.library.opcheck(OPS.live_boxes.default, (before, WATCHED, 3, 1e-4), test_utils="test_schema")
    for k, value in ((0, 3), (1, 30), (4, 0)):
        numbers = list(WATCHED)
        numbers[k] = value
        with pytest.raises(ValueError, match="piece 0 is"):
            live_boxes(before, numbers, 3, 1e-4)


def many(device: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Forth and back on 40 patches of up to 4 layers, and what the operators leave."""
    g = torch.Generator().manual_seed(5)
    layers, sizes, rows = [], [], 0
    for patch in range(40):
        width, height = (int(n) for n in torch.randint(1, 90, (2,), generator=g))
        sizes += [width, height]
        for _ in range(patch % 5):
            x0, y0 = int(torch.randint(width, (), generator=g)), int(torch.randint(height, (), generator=g))
            layers += [patch, x0, y0, width, height, rows, rows]
            rows += (width - x0) * (height - y0)
    given = torch.rand(rows, 4, generator=g).to(device, dtype)
    given[::5, 3] *= -1  # stopped there
    pixels = sum(w * h for w, h in zip(sizes[::2], sizes[1::2], strict=True))
    v = torch.randn(pixels, 3, generator=g).to(device, dtype), torch.randn(pixels, generator=g).to(device, dtype)
    corners = [0, *(sum(w * h for w, h in zip(sizes[:k:2], sizes[1:k:2], strict=True)) for k in range(2, 80, 2))]
    fragments = [n for k in range(40) for n in (corners[k], sizes[2 * k], sizes[2 * k], 1, 100 * k, 100 * k)]

    def run() -> tuple[Tensor, ...]:
        out, alpha, before = composite_fragments(given, layers, sizes)
        back = composite_fragments_backward(given, before, *v, layers, sizes, rows)
        gathered, v_color, v_alpha = out.new_zeros(4000, 4), torch.zeros_like(out), torch.zeros_like(alpha)
        gather_fragments(out, alpha, fragments, gathered)
        scatter_fragments(gathered, fragments, v_color, v_alpha)
        watched = [n for k in range(40) for n in (k % 3, corners[k], 7, 9, sizes[2 * k], sizes[2 * k + 1])]
        boxes = live_boxes(alpha, watched, 4, 0.9)
        return out, alpha, before, back, gathered, v_color, v_alpha, boxes

    return {"run": run}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_cpus_operators_equal_the_reference(dtype: torch.dtype) -> None:
    run = many("cpu", dtype)["run"]
    found = run()
    with use_reference():
        expected = run()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert [a.dtype for a in found] == [b.dtype for b in expected]


def test_threads_change_nothing() -> None:
    same_on_threads(many("cpu")["run"])


@pytest.mark.gpu
def test_a_gpu_does_the_same() -> None:
    expected, there = many("cpu")["run"](), many("cuda")["run"]
    graph, replayed = captured(there)
    for tensor in replayed:
        tensor.fill_(7)
    graph.replay()
    for found in (there(), replayed):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)
    with use_reference():
        for a, b in zip(there(), expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_gradients_on_a_gpu() -> None:
    def gradient(device: str) -> Tensor:
        given = received(4, torch.float32, device).requires_grad_()
        out, alpha, _ = composite_fragments(given, LAYERS, SIZES)
        (out.square().sum() + (3 * alpha).sin().sum()).backward()
        assert given.grad is not None
        return given.grad.cpu()

    torch.testing.assert_close(gradient("cuda"), gradient("cpu"), rtol=1e-5, atol=1e-6)
    with use_reference():
        torch.testing.assert_close(gradient("cuda"), gradient("cpu"), rtol=1e-5, atol=1e-6)
