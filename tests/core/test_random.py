"""Normal numbers by counter: the published generator, the right distribution, and parts that are those of the whole."""

import math

import pytest
import torch

from cuda_ext.reference import noise
from ns_multigpu.core import random
from ns_multigpu.core.random import keyed_normals


def test_bits_are_splitmix64() -> None:
    golden = noise._signed(0x9E3779B97F4A7C15)
    bits = noise._splitmix(torch.arange(1, 4) * golden)  # of the state 0
    assert [int(b) % 2**64 for b in bits] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = keyed_normals(3, "noise", 7, 0, 1000, 3)
    assert whole.shape == (1000, 3) and whole.dtype == torch.float32
    monkeypatch.setattr(random, "_ROWS", 97)
    for first, count in ((0, 1000), (0, 1), (13, 500), (999, 1), (500, 0)):
        assert torch.equal(keyed_normals(3, "noise", 7, first, count, 3), whole[first : first + count])
    far = 3 * 10**9  # a model's rows, times three, go beyond 32 bits
    assert torch.equal(keyed_normals(3, "noise", 7, far, 10, 3)[4:], keyed_normals(3, "noise", 7, far + 4, 6, 3))
    for other in (keyed_normals(4, "noise", 7, 0, 1000, 3), keyed_normals(3, "noise", 8, 0, 1000, 3)):
        assert not bool((other == whole).any())


def test_numbers_are_normal() -> None:
    x = keyed_normals(0, "test", 0, 0, 200_000, 3).double()
    assert float(x.mean().abs()) < 0.005
    covariance = x.T @ x / len(x)
    torch.testing.assert_close(covariance, torch.eye(3, dtype=torch.float64), rtol=0, atol=0.01)
    assert abs(float((x[1:] * x[:-1]).mean())) < 0.005  # neighbours in the table
    for limit in (0.1, 0.7, 1.5, 2.5, 3.5):
        share = float((x.abs() < limit).double().mean())
        assert share == pytest.approx(math.erf(limit / math.sqrt(2)), abs=0.002), limit
    steps = torch.stack([keyed_normals(0, "test", step, 0, 20_000, 1)[:, 0] for step in range(4)]).double()
    torch.testing.assert_close(steps @ steps.T / 20_000, torch.eye(4, dtype=torch.float64), rtol=0, atol=0.03)


@pytest.mark.gpu
def test_a_gpu_draws_the_same() -> None:
    there = keyed_normals(3, "noise", 7, 50, 5000, 3, "cuda").cpu()
    torch.testing.assert_close(there, keyed_normals(3, "noise", 7, 50, 5000, 3), rtol=1e-6, atol=1e-6)
