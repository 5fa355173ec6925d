"""Normal numbers by counter: the published generator, and the right distribution."""

import math

import pytest
import torch

from cuda_ext.reference import noise
from ns_multigpu.core.random import seed_from


def normals(step: int, rows: int, width: int) -> torch.Tensor:
    numbers = noise.table_normals(torch.arange(rows * width), seed_from(0, "test", step))
    return numbers.view(rows, width).double()


def test_bits_are_splitmix64() -> None:
    golden = noise._signed(0x9E3779B97F4A7C15)
    bits = noise._splitmix(torch.arange(1, 4) * golden)  # of the state 0
    assert [int(b) % 2**64 for b in bits] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_numbers_are_normal() -> None:
    x = normals(0, 200_000, 3)
    assert float(x.mean().abs()) < 0.005
    covariance = x.T @ x / len(x)
    torch.testing.assert_close(covariance, torch.eye(3, dtype=torch.float64), rtol=0, atol=0.01)
    assert abs(float((x[1:] * x[:-1]).mean())) < 0.005  # neighbours in the table
    for limit in (0.1, 0.7, 1.5, 2.5, 3.5):
        share = float((x.abs() < limit).double().mean())
        assert share == pytest.approx(math.erf(limit / math.sqrt(2)), abs=0.002), limit
    steps = torch.stack([normals(step, 20_000, 1)[:, 0] for step in range(4)])
    torch.testing.assert_close(steps @ steps.T / 20_000, torch.eye(4, dtype=torch.float64), rtol=0, atol=0.03)
