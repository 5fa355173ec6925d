"""`encode_grid`: what nerfstudio's hash encoding computes, and its gradients; on a CPU and on a GPU."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.field_components.encodings import HashEncoding
from torch import Tensor

from cuda_ext import encode_grid
from tests.cuda_ext.emulated import compiled

OPS: Any = torch.ops.ns_multigpu


def grid(levels: int = 4, width: int = 2, log2_size: int = 8, count: int = 500) -> tuple[Tensor, Tensor, Tensor, int]:
    """Positions, table, scalings and size; some positions lie on faces of voxels, some share a voxel."""
    g = torch.Generator().manual_seed(levels * 100 + width)
    positions = torch.rand(count, 3, generator=g)
    positions[: count // 5] = (positions[: count // 5] * 16).round() / 16
    table = torch.randn(levels << log2_size, width, generator=g)
    scalings = torch.floor(8 * 1.7 ** torch.arange(levels))
    return positions, table, scalings, log2_size


def along_rays(positions: Tensor) -> Tensor:
    """Return positions in the order of rays: runs of one to all of a warp's are in one voxel."""
    steps = torch.arange(len(positions)) % 37 * torch.tensor([3e-5, 2e-3])[torch.arange(len(positions)) // 150 % 2]
    return (positions[::37].repeat_interleave(37, 0)[: len(positions)] + steps[:, None]).clamp(0, 1)


def gradients(positions: Tensor, table: Tensor, scalings: Tensor, log2_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features, and the gradients of a weighted sum of them."""
    leaves = positions.clone().requires_grad_(), table.clone().requires_grad_()
    out = encode_grid(*leaves, scalings, log2_size)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    (out * weights).sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return out.detach(), leaves[0].grad, leaves[1].grad


@pytest.mark.parametrize("log2_size", [8, 14])
def test_it_is_nerfstudios(log2_size: int) -> None:
    """Small tables, in which voxels collide, and large ones."""
    theirs = HashEncoding(num_levels=5, min_res=4, max_res=80, log2_hashmap_size=log2_size, implementation="torch")
    positions = grid(count=300)[0]
    leaf = positions.clone().requires_grad_()
    expected = theirs(leaf)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7))
    (expected * weights).sum().backward()
    found = gradients(positions, theirs.hash_table.detach(), theirs.scalings.float(), log2_size)
    torch.testing.assert_close(found[0], expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], leaf.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[2], theirs.hash_table.grad, rtol=1e-4, atol=1e-6)


def test_numbers_of_gradients() -> None:
    positions, table, scalings, size = grid(levels=2, count=40)
    inside = (positions * 0.9 + 0.013).double().requires_grad_()  # not at a face, where there is no derivative
    leaf = table.double().requires_grad_()
    encode = lambda p, t: encode_grid(p, t, scalings.double(), size)  # noqa: E731
    assert torch.autograd.gradcheck(encode, (inside, leaf), eps=1e-7, fast_mode=True)


def test_empty_input() -> None:
    positions, table, scalings, size = grid(count=0)
    out, moved, table_grad = gradients(positions, table, scalings, size)
    assert out.shape == (0, 8) and moved.shape == (0, 3) and not table_grad.any()


def test_the_operators_have_fake_kernels() -> None:
    positions, table, scalings, size = grid(count=9)
    out = OPS.encode_grid(positions, table, scalings, size)
    torch.library.opcheck(OPS.encode_grid.default, (positions, table, scalings, size), test_utils="test_faketensor")
    for moves in (True, False):
        arguments = (positions, table, scalings, size, torch.ones_like(out), moves)
        torch.library.opcheck(OPS.encode_grid_backward.default, arguments, test_utils="test_faketensor")


class _HashGrid(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        ("scalings", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("levels", "width", "log2_size")),
    )


def test_the_kernel_sums_runs_of_one_voxel(tmp_path: Path) -> None:
    """The CUDA kernel of the gradient, on a CPU: positions along rays, in any order, and without a gradient."""
    library = compiled(tmp_path, ("radiance/encode_grid",), "encode_grid.cpp")
    for width, count in ((2, 700), (1, 33), (4, 300)):
        positions, table, scalings, size = grid(levels=1, width=width, log2_size=10, count=count)
        for at in (positions, along_rays(positions)):
            v_features = torch.randn(count, width, generator=torch.Generator().manual_seed(8))
            v_features[count // 3 : count // 2] = 0.0
            expected = OPS.encode_grid_backward(at, table, scalings, size, v_features, True)
            found = torch.zeros_like(at), torch.zeros_like(table)
            there = ctypes.byref(_HashGrid(table.data_ptr(), scalings.data_ptr(), 1, width, size))
            pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (at, v_features, *found)]
            library.encode_grid_backward(there, pointers[0], ctypes.c_int64(count), *pointers[1:])
            for here, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(here, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("levels", "width", "log2_size", "count"),
    [(4, 2, 8, 500), (16, 2, 19, 200_000), (5, 1, 10, 777), (3, 4, 12, 1), (2, 8, 5, 5000), (4, 2, 8, 0)],
)
def test_a_gpu_computes_the_same(levels: int, width: int, log2_size: int, count: int) -> None:
    positions, table, scalings, size = grid(levels, width, log2_size, count)
    positions[count // 2 :] = along_rays(positions)[count // 2 :]
    expected = gradients(positions, table, scalings, size)
    found = gradients(positions.cuda(), table.cuda(), scalings.cuda(), size)
    for name, there, here in zip(("features", "positions", "table"), found, expected, strict=True):
        scale = float(here.abs().max()) if here.numel() else 0.0
        torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.mark.gpu
def test_a_gpu_names_wrong_widths() -> None:
    positions, table, scalings, size = grid(width=3)
    with pytest.raises(ValueError, match="1, 2, 4 or 8"):
        encode_grid(positions.cuda(), table.cuda(), scalings.cuda(), size)
