"""`add_noise` on CUDA: our kernel against the fp64 reference, captured, and to the bit the same again."""

import pytest
import torch
from torch.testing import assert_close

import cuda_ext
from tests.cuda_ext.densify.test_noise import RULE, gaussians, moved
from tests.cuda_ext.graphs import OUR_KERNELS, captured

pytestmark = OUR_KERNELS


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("count", [1, 129, 5000])
def test_noise(count: int, rows: bool) -> None:
    points = gaussians(count, torch.float64)
    places = torch.randperm(3 * count)[:count] if rows else None
    there = None if places is None else places.cuda()
    got = moved([x.float().cuda() for x in points], rows=there, first=17)
    with cuda_ext.use_reference():
        want = moved(points, rows=places, first=17)
    assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4)


def test_it_can_be_captured_and_repeats_its_bits() -> None:
    points = [x.cuda() for x in gaussians(700)]
    expected = moved(points)
    assert torch.equal(moved(points), expected)
    means, taken = points[0].clone(), torch.ones((), device="cuda")

    def step() -> torch.Tensor:
        means.copy_(points[0])
        cuda_ext.add_noise(means, *points[1:], start=99, taken=taken, **RULE)
        return means

    graph, out = captured(step)
    graph.replay()
    assert torch.equal(out, expected)
    taken.zero_()
    graph.replay()
    assert torch.equal(out, points[0])
