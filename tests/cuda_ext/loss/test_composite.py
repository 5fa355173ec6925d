"""`composite`: pixels over a background, clamped; its gradient where that is cut off; as an operator."""

import pytest
import torch
from torch import Tensor

from cuda_ext import composite, use_reference

pytestmark = pytest.mark.usefixtures("native")
OPS = torch.ops.ns_multigpu


def pixels(count: int, channels: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """Pixels, some of which are too bright and some too dark to be shown, and none near either bound."""
    g = torch.Generator().manual_seed(seed)
    out = torch.rand(count, channels, generator=g, dtype=torch.float64) * 1.6 - 0.5
    alpha, background = torch.rand(count, generator=g, dtype=torch.float64), torch.tensor([0.2, 0.5, 0.9])
    colors = out[:, :3] + (1 - alpha)[:, None] * background
    near = ((colors.abs() < 0.01) | ((colors - 1).abs() < 0.01)).any(1)
    return out[~near].to(dtype), alpha[~near].to(dtype), background.to(dtype)


def gradients(run: object, out: Tensor, alpha: Tensor, background: Tensor, v_rgb: Tensor) -> tuple[Tensor, ...]:
    leaves = [out.clone().requires_grad_(), alpha.clone().requires_grad_()]
    return torch.autograd.grad(run(*leaves, background), leaves, v_rgb)  # type: ignore[operator]


@pytest.mark.parametrize("channels", [3, 4, 7])
@pytest.mark.parametrize("run", [composite, OPS.composite], ids=["function", "operator"])
def test_composite_over_background_is_clamped(run: object, channels: int) -> None:
    out, alpha, background = pixels(500, channels)
    rgb = run(out, alpha, background)  # type: ignore[operator]
    wanted = torch.empty(len(out), 3)
    for s in range(len(out)):
        for d in range(3):
            value = float(out[s, d]) + (1 - float(alpha[s])) * float(background[d])
            wanted[s, d] = min(max(value, 0.0), 1.0)
    torch.testing.assert_close(rgb, wanted, rtol=1e-6, atol=1e-6)
    assert 0.02 < (wanted == 0).float().mean() < 0.5 and 0.02 < (wanted == 1).float().mean() < 0.5


@pytest.mark.parametrize("channels", [3, 5])
@pytest.mark.parametrize("run", [composite, OPS.composite], ids=["function", "operator"])
def test_gradcheck(run: object, channels: int) -> None:
    out, alpha, background = pixels(20, channels, torch.float64)
    leaves = (out.requires_grad_(), alpha.requires_grad_())
    assert torch.autograd.gradcheck(lambda *given: run(*given, background), leaves)  # type: ignore[operator]


def test_the_operators_gradient_is_autograds() -> None:
    out, alpha, background = pixels(300, 4)
    # Exactly on the bounds torch.clamp lets gradients through.
    out[:2], alpha[:2] = torch.tensor([[0.0, 1.0, 0.5, 3.0], [1.0, 0.0, 0.0, -3.0]]), 1.0
    v_rgb = torch.randn(len(out), 3, generator=torch.Generator().manual_seed(1))
    expected = gradients(composite, out, alpha, background, v_rgb)
    found = gradients(OPS.composite, out, alpha, background, v_rgb)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert torch.equal(found[0][:2, :3], v_rgb[:2]) and not found[0][:, 3].any()
    assert 0.1 < (found[0][:, :3] == 0).float().mean() < 0.9


def test_no_pixels() -> None:
    out, alpha, background = torch.zeros(0, 4), torch.zeros(0), torch.ones(3)
    assert composite(out, alpha, background).shape == OPS.composite(out, alpha, background).shape == (0, 3)
    assert [g.shape for g in OPS.composite_backward(out, alpha, background, torch.zeros(0, 3))] == [(0, 4), (0,)]


def test_opcheck() -> None:
    out, alpha, background = pixels(30, 4)
    leaves = (out.clone().requires_grad_(), alpha.clone().requires_grad_())
    torch.library.opcheck(OPS.composite.default, (*leaves, background))
    torch.library.opcheck(OPS.composite_backward.default, (out, alpha, background, torch.ones(len(out), 3)))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [3, 4, 7])
@pytest.mark.parametrize("count", [3, 31, 70_001])
def test_on_a_gpu(count: int, channels: int) -> None:
    given = pixels(count, channels, seed=count)
    v_rgb = torch.randn(len(given[0]), 3, generator=torch.Generator().manual_seed(1))
    there = [x.cuda() for x in given]
    torch.testing.assert_close(composite(*there).cpu(), composite(*given), rtol=1e-6, atol=1e-6)
    expected = gradients(composite, *given, v_rgb)
    found = gradients(composite, *there, v_rgb.cuda())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)
    with use_reference():
        torch.testing.assert_close(composite(*there).cpu(), composite(*given), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_a_gpu_takes_views_and_names_wrong_types() -> None:
    out, alpha, background = (x.cuda() for x in pixels(900, 6))
    strided = out.T.contiguous().T
    assert not strided.is_contiguous() and torch.equal(
        composite(strided, alpha, background), composite(out, alpha, background)
    )
    with pytest.raises(TypeError):
        composite(out.double(), alpha.double(), background.double())
