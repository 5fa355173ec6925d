"""Formulas whose results for a point do not depend on other points, bit for bit; and gsplat's rotations."""

from collections.abc import Callable

import pytest
import torch
from gsplat.utils import normalized_quat_to_rotmat
from torch import Tensor

from ns_multigpu.primitives.deterministic import logit, rotate, rotations, sigmoid

BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def quats(count: int, dtype: torch.dtype) -> Tensor:
    """Of many lengths; some along the axes, with zeros of either sign, and one that is none."""
    g = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, 4, generator=g, dtype=dtype) * torch.randn(count, 1, generator=g, dtype=dtype).exp()
    special = [[1, 0, 0, 0], [0, -1, 0, -0.0], [-0.0, 0, 3, 0], [-1, -0.0, 0, 1e-30], [0, 0, 0, 0], [2, 2, -2, 2]]
    drawn[: len(special)] = torch.tensor(special, dtype=dtype)
    return drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotations_are_those_of_gsplat(dtype: torch.dtype) -> None:
    given = quats(1001, dtype)
    w, x, y, z = given.unbind(-1)
    length = (w * w + x * x + y * y + z * z).sqrt().clamp_min(1e-12)
    expected = normalized_quat_to_rotmat(given / length[:, None])
    found = rotations(given)
    assert torch.equal(found.view(BITS[dtype]), expected.view(BITS[dtype])), "the signs of zeros too"
    assert rotations(given[:0]).shape == (0, 3, 3)


def test_rotate() -> None:
    matrices, vectors = rotations(quats(50, torch.float64)), torch.randn(2, 50, 3, dtype=torch.float64)
    torch.testing.assert_close(rotate(matrices, vectors), (matrices @ vectors[..., None])[..., 0])
    torch.testing.assert_close(rotate(matrices.mT, rotate(matrices, vectors)), vectors)


def test_inverses() -> None:
    x = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    torch.testing.assert_close(sigmoid(x), x.sigmoid())
    torch.testing.assert_close(logit(sigmoid(x)), x)
    out = torch.empty_like(x)
    assert logit(sigmoid(x), out=out) is out and torch.equal(out, logit(sigmoid(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_depends_on_the_others(dtype: torch.dtype) -> None:
    given = quats(203, dtype)
    formulas: list[Callable[[Tensor], Tensor]] = [
        rotations, lambda x: rotate(rotations(x), x[:, 1:]), sigmoid, lambda x: logit(sigmoid(x)),
    ]  # fmt: skip
    for formula in formulas:
        whole = formula(given)
        for size in (1, 3, 50):
            parts = torch.cat([formula(part) for part in given.split(size)])
            assert torch.equal(parts.view(BITS[dtype]), whole.view(BITS[dtype]))
