"""Colours mapped by bilateral grids: the CUDA kernels, on a CPU (`emulated`) and on a GPU, against torch in float64."""

import ctypes

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.loss.bilateral_map import bilateral_map, bilateral_variation_backward
from ns_multigpu.core.step.bilateral_grids import variation
from tests.cuda_ext.emulated import compiled
from tests.lib.ranks import DEVICES

CASES = [
    ((8, 16, 16), (3, 5, 70, 61), (90, 77)),  # cells of 6 x 5 pixels
    ((4, 3, 2), (0, 0, 100, 70), (100, 70)),  # cells of several tiles
    ((17, 2, 3), (5, 0, 45, 80), (45, 80)),  # more levels than a thread sums
    ((5, 9, 30), (10, 0, 24, 9), (25, 9)),  # cells smaller than a pixel
    ((1, 1, 1), (0, 2, 40, 35), (40, 40)),  # one map
]
"""Levels, rows and columns of a grid, the rectangle, and the view's size."""
Case = tuple[tuple[int, int, int], tuple[int, int, int, int], tuple[int, int]]


def given(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return a grid, colours, some of them black and white, and gradients of the results."""
    shape, (x0, y0, x1, y1), _ = case
    generator = torch.Generator().manual_seed(3)
    grid = torch.randn(12, *shape, generator=generator)
    rgb = (1.4 * torch.rand(y1 - y0, x1 - x0, 3, generator=generator) - 0.2).clamp(0, 1)
    rgb[::7] = 1.0
    rgb[3::7] = 0.0
    return grid, rgb, torch.randn(rgb.shape, generator=generator)


def expected(case: Case) -> list[Tensor]:
    """Return the results, and the gradients by grid and colours, of torch in float64."""
    grid, rgb, v_out = (tensor.double() for tensor in given(case))
    leaves = [grid.requires_grad_(), rgb.requires_grad_()]
    found = bilateral_map(*leaves, *case[1:])
    return [found.detach(), *torch.autograd.grad(found, leaves, v_out)]


def check(found: list[Tensor], case: Case) -> None:
    for one, wanted, name in zip(found, expected(case), ("out", "v_grid", "v_rgb"), strict=True):
        # White and black are not quite gray 1 and 0 after rounding, and have a slope then, or none.
        inner = (given(case)[1].amax(-1) > 0) & (given(case)[1].amin(-1) < 1) if name == "v_rgb" else ...
        largest = float(wanted.abs().max())
        difference = (one.double().cpu() - wanted)[inner].abs().max()
        assert float(difference) <= 2e-5 * largest, f"{name}: {float(difference):.3g} of {largest:.3g}"


class _Grid(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), *((name, ctypes.c_int32) for name in ("levels", "rows", "columns")))


class _Colors(ctypes.Structure):
    _fields_ = (
        ("rgb", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("height", "width", "x0", "y0", "view_width", "view_height")),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("emulated"), ("loss/bilateral_map",), "bilateral.cpp")


@pytest.mark.parametrize("case", CASES)
def test_kernels_on_a_cpu(case: Case, library: ctypes.CDLL) -> None:
    grid, rgb, v_out = given(case)
    out, v_grid, v_rgb = torch.full_like(rgb, torch.nan), torch.zeros_like(grid), torch.full_like(rgb, torch.nan)
    place = ctypes.byref(_Grid(grid.data_ptr(), *grid.shape[1:]))
    colors = ctypes.byref(_Colors(rgb.data_ptr(), *rgb.shape[:2], *case[1][:2], *case[2]))
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (out, v_out, v_grid, v_rgb)]
    library.bilateral_map(place, colors, pointers[0])
    library.bilateral_map_backward(place, colors, *pointers[1:])
    check([out, v_grid, v_rgb], case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_kernels_on_a_gpu(case: Case) -> None:
    grid, rgb, v_out = (tensor.cuda() for tensor in given(case))
    leaves = [grid.requires_grad_(), rgb.requires_grad_()]
    found = bilateral_map(*leaves, *case[1:])
    check([found.detach(), *torch.autograd.grad(found, leaves, v_out)], case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 12, 8, 5, 7), (1, 12, 1, 3, 1), (3, 12, 2, 1, 4)])
def test_gradient_of_variation(shape: tuple[int, ...], device: str, library: ctypes.CDLL) -> None:
    grids = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    leaf = grids.double().requires_grad_()
    (wanted,) = torch.autograd.grad(3 * variation(leaf), leaf)
    there = bilateral_variation_backward(grids.to(device), 3.0)
    torch.testing.assert_close(there.cpu().double(), wanted, atol=1e-6, rtol=1e-5)
    found, sizes = torch.full_like(grids, torch.nan), (ctypes.c_int * 4)(shape[0], *shape[2:])
    library.bilateral_variation_backward(
        ctypes.c_void_p(grids.data_ptr()), sizes, ctypes.c_float(3.0), ctypes.c_void_p(found.data_ptr())
    )
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-5)


def test_wrong_shapes_are_named() -> None:
    grid, rgb = torch.zeros(12, 8, 4, 4), torch.zeros(10, 20, 3)
    with pytest.raises(ValueError, match=r"need grid \[12, .* and rgb \[10, 21, 3\]"):
        bilateral_map(grid, rgb, (0, 0, 21, 10), (30, 30))
    with pytest.raises(ValueError, match=r"\(15, 0, 35, 10\) lies in a view of 30x30"):
        bilateral_map(grid, rgb, (15, 0, 35, 10), (30, 30))
    with pytest.raises(ValueError, match="not 65"):
        bilateral_map(torch.zeros(12, 65, 4, 4), rgb, (0, 0, 20, 10), (30, 30))
