"""`rasterize` with `mark_stops`: the sign of alpha marks where compositing stopped, and nothing else changes."""

import pytest
import torch
from torch import Tensor

from cuda_ext import rasterize
from tests.cuda_ext.splats import Splats, composite_slowly, make_splats

pytestmark = pytest.mark.usefixtures("native")


def dense(dtype: torch.dtype, channels: int = 3) -> Splats:
    """Splats that close about half of the pixels."""
    return make_splats(130, 23, 18, opacities=(0.6, 1.0), channels=channels, dtype=dtype)


def closed(splats: Splats) -> Tensor:
    """Return the mask of pixels that the rule closes: those at which one more splat would count than were blended."""
    _, _, blended = composite_slowly(splats)
    found = []
    for k, hits in enumerate(blended):
        x, y = k % 23 + 0.5, k // 23 + 0.5
        offset = splats.means2d - splats.means2d.new_tensor([x, y])
        a, b, c = splats.conics.unbind(1)
        dx, dy = offset.unbind(1)
        raw = splats.row_opacities * torch.exp(-(0.5 * (a * dx * dx + c * dy * dy) + b * dx * dy))
        found.append(int((raw >= 1 / 255).sum()) > len(hits))
    return torch.tensor(found)


def marked(splats: Splats, marks: bool) -> list[Tensor]:
    """Colour, what is covered, the sign's bits, and the gradients of a weighting of the first two."""
    leaves = splats.leaves()
    device = splats.means2d.device
    probe = torch.zeros_like(splats.means2d).requires_grad_()
    offsets, ids = splats.intersect()
    means2d, conics, opacities, features = leaves.inputs()
    given = means2d, conics, opacities, features, offsets, ids
    out, alpha, last = rasterize(*given, splats.patches, 16, probe, marks)
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(alpha.shape, generator=g, dtype=torch.float64).to(device, alpha.dtype)
    loss = ((out.sum(1) + alpha.abs()) * weight).sum()
    gradients = torch.autograd.grad(loss, [*leaves.inputs(), probe])
    return [out.detach(), alpha.detach().abs(), last, alpha.detach() < 0, *gradients]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("channels", [3, 2])
def test_sign_marks_the_stop_of_compositing(channels: int) -> None:
    splats = dense(torch.float64, channels)
    found, plain = marked(splats, True), marked(splats, False)
    wanted = closed(splats)
    assert 0.2 < wanted.float().mean() < 0.9
    assert torch.equal(found[3], wanted)
    assert not bool(plain[3].any())
    for k in (0, 1, 2, 4, 5, 6, 7, 8):
        torch.testing.assert_close(found[k], plain[k], rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [3, 4, 6])
def test_the_sign_on_a_gpu(channels: int) -> None:
    splats = dense(torch.float32, channels).to("cuda")
    found, plain = marked(splats, True), marked(splats, False)
    expected = marked(dense(torch.float32, channels), True)
    assert (found[3].cpu() != expected[3]).float().mean() < 5e-3, "rounding decides a few"
    assert float(found[3].float().mean()) > 0.2 and not bool(plain[3].any())
    assert torch.equal(found[1], plain[1]) and torch.equal(found[0], plain[0])
    for a, b in zip(found[4:], plain[4:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
