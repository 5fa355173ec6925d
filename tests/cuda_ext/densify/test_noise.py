"""`add_noise`: the compiled operator and the reference, the table it draws from, and who holds a Gaussian."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cuda_ext
from cuda_ext.reference import noise as reference
from ns_multigpu.core.random import seed_from

RULE = {"scale": 7.0, "steepness": 100.0, "threshold": 0.005}


def gaussians(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Means, quaternions of any length, log-scales, and logits of opacities about the threshold."""
    g = torch.Generator().manual_seed(count)
    shapes, centers, spreads = ((count, 3), (count, 4), (count, 3), (count,)), (0, 0, -1, -5.3), (1, 2, 0.5, 1)
    drawn = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return [(c + s * x).to(dtype) for x, c, s in zip(drawn, centers, spreads, strict=True)]


def moved(points: list[Tensor], start: int = 99, **options: object) -> Tensor:
    """Return the means behind the noise; these stay as they are."""
    means = points[0].clone()
    cuda_ext.add_noise(means, *points[1:], start=start, **(RULE | options))  # type: ignore[arg-type]
    return means


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_it_equals_the_reference(dtype: torch.dtype, tolerance: float) -> None:
    points = gaussians(500, dtype)
    got = moved(points, first=40)
    with cuda_ext.use_reference():
        want = moved(points, first=40)
    assert (want - points[0]).norm(dim=-1).median() > 0.01
    assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_it_is_equation_10_of_the_table(either: str) -> None:
    means, quats, log_scales, logits = points = gaussians(60, torch.float64)
    drawn = reference.table_normals(torch.arange(180), seed_from(3, "noise", 40)).view(60, 3).double()
    rotation = cuda_ext.reference.projection.rotation_matrices(quats)
    covariance = rotation @ torch.diag_embed((2 * log_scales).exp()) @ rotation.mT
    gate = torch.sigmoid(100.0 * (0.005 - torch.sigmoid(logits)))
    expected = means + 7.0 * gate[:, None] * (covariance @ drawn[:, :, None])[:, :, 0]
    assert_close(moved(points, seed_from(3, "noise", 40)), expected, rtol=1e-6, atol=1e-6)


def test_noise_is_independent_of_the_owner(either: str) -> None:
    points = gaussians(90)
    whole = moved(points)
    part = moved([x[30:70] for x in points], first=30)
    assert torch.equal(part, whole[30:70])
    places = torch.randperm(90, generator=torch.Generator().manual_seed(0))[:40]
    assert torch.equal(moved([x[places] for x in points], rows=places), whole[places])


def test_noise_is_independent_of_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    points = gaussians(60)
    with cuda_ext.use_reference():
        whole = moved(points)
        monkeypatch.setattr(reference, "_PIECE", 7)
        assert torch.equal(moved(points), whole)


def test_cancelled_step_moves_no_points(either: str) -> None:
    points = gaussians(20)
    assert torch.equal(moved(points, taken=torch.tensor(0.0)), points[0])
    assert torch.equal(moved(points, taken=torch.tensor(1.0)), moved(points))
    assert moved([x[:0] for x in points]).shape == (0, 3)
