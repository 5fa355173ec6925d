"""`series` on CUDA: our kernels against the fp64 reference, captured, and to the bit the same again."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

import cuda_ext
from tests.cuda_ext.graphs import OUR_KERNELS, check_replays
from tests.cuda_ext.moments import with_gradients
from tests.cuda_ext.project.test_series import OPS, rows_of, summed, tables

pytestmark = OUR_KERNELS
MANY = 19  # views: more than two passes of the backward kernel


@pytest.mark.parametrize("width", [3, 45])
@pytest.mark.parametrize(("points", "views"), [(1, 1), (255, 2), (1300, 3), (100, MANY)])
def test_series(points: int, views: int, width: int) -> None:
    rows = rows_of(points, views)
    leaves = tables(points, len(rows[0]), width, 2)
    there = tuple(ids.cuda() for ids in rows)
    on_gpu = [leaf.detach().float().cuda().requires_grad_() for leaf in leaves]
    (out,), gradients = with_gradients(partial(summed, there, views), on_gpu)
    with cuda_ext.use_reference():
        (expected,), expected_gradients = with_gradients(partial(summed, rows, views), leaves)
    assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-4)


def test_it_can_be_captured_and_repeats_its_bits() -> None:
    rows = tuple(ids.cuda() for ids in rows_of(700, 2))
    inputs = [leaf.detach().float().cuda() for leaf in tables(700, len(rows[0]), 45, 2)]
    given = torch.randn(len(rows[0]), 45, device="cuda")

    def both() -> tuple[torch.Tensor, ...]:
        return OPS.series(*inputs, *rows, 2), *OPS.series_backward(*inputs, *rows, 2, given)

    check_replays(both)
