"""`series`: the native operator and the reference against each other, and against the formula."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cuda_ext
from tests.cuda_ext.moments import with_gradients
from tests.cuda_ext.scenes import random_scene

OPS = torch.ops.ns_multigpu
F64 = torch.float64


def tables(points: int, rows: int, width: int, terms: int, dtype: torch.dtype = F64) -> list[Tensor]:
    """Random `base`, `terms` and `weights`, as leaves."""
    g = torch.Generator().manual_seed(points + width)
    shapes = ((points, width), (points, terms, width), (rows, terms))
    return [torch.randn(shape, generator=g, dtype=F64).to(dtype).requires_grad_() for shape in shapes]


def rows_of(points: int, views: int) -> tuple[Tensor, Tensor]:
    """Return some of the (view, point) pairs, and two lines of padding."""
    view_ids, point_ids = random_scene(points, views).all_rows()
    some = torch.rand(len(view_ids), generator=torch.Generator().manual_seed(views)) < 0.7
    last = torch.full((2,), views - 1, dtype=torch.int32)
    return torch.cat([view_ids[some], last]), torch.cat([point_ids[some], torch.full_like(last, -1)])


def summed(rows: tuple[Tensor, Tensor], views: int, *leaves: Tensor) -> tuple[Tensor]:
    return (cuda_ext.series(*leaves, *rows, views),)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("width", "terms"), [(3, 2), (45, 2), (33, 1)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (F64, 1e-12)])
def test_series_equals_reference(dtype: torch.dtype, rtol: float, width: int, terms: int) -> None:
    rows = rows_of(200, 3)
    leaves = tables(200, len(rows[0]), width, terms, dtype)
    (out,), gradients = with_gradients(partial(summed, rows, 3), leaves)
    with cuda_ext.use_reference():
        (expected,), expected_gradients = with_gradients(partial(summed, rows, 3), leaves)
    assert_close(out, expected, rtol=rtol, atol=rtol)
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert want.norm() > 0
        assert_close(got, want, rtol=rtol, atol=10 * rtol)


def test_series_is_the_formula(either: str) -> None:
    view_ids, point_ids = rows_of(20, 2)
    base, terms, weights = tables(20, len(view_ids), 5, 2)
    found = cuda_ext.series(base, terms, weights, view_ids, point_ids, 2)
    for m, p in enumerate(point_ids[:-2].tolist()):
        assert_close(found[m], base[p] + weights[m, 0] * terms[p, 0] + weights[m, 1] * terms[p, 1])
    assert (found[-2:] == 0).all()


def test_gradcheck(either: str) -> None:
    rows = rows_of(7, 2)
    assert torch.autograd.gradcheck(partial(summed, rows, 2), tables(7, len(rows[0]), 4, 2))


@pytest.mark.usefixtures("native")
def test_opcheck() -> None:
    rows = rows_of(12, 2)
    torch.library.opcheck(OPS.series, (*tables(12, len(rows[0]), 3, 2, torch.float32), *rows, 2))


def test_nothing_to_do(either: str) -> None:
    none = torch.empty(0, dtype=torch.int32)
    base, terms, weights = tables(0, 0, 3, 2)
    found = cuda_ext.series(base, terms, weights, none, none, 1)
    assert found.shape == (0, 3)
    found.sum().backward()
