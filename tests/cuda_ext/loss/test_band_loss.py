"""`band_loss_into`: the loss of a whole view and its gradient by what was blended, from one rectangle or from many."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from pytorch_msssim import SSIM
from torch import Tensor

from cuda_ext import Band, band_loss_into, composite, l1_ssim
from tests.lib.ranks import DEVICES

OPS = torch.ops.ns_multigpu
Rectangle = tuple[int, int, int, int]
BACKGROUND = (0.2, 0.1, 0.9)


class Losses(NamedTuple):
    """Results of a rectangle: rgb [h,w,3], loss [], v_out [h w,3], v_alpha [h w]."""

    rgb: Tensor
    loss: Tensor
    v_out: Tensor
    v_alpha: Tensor


class Rendering(NamedTuple):
    """out [h w,3], alpha [h w], background [3], target [h,w,3], v_l1 [], v_ssim []."""

    out: Tensor
    alpha: Tensor
    background: Tensor
    target: Tensor
    v_l1: Tensor
    v_ssim: Tensor
    clamp: bool = True

    def cut(self, x0: int, y0: int, x1: int, y1: int) -> "Rendering":
        h, w = self.target.shape[:2]
        out = self.out.view(h, w, 3)[y0:y1, x0:x1].reshape(-1, 3)
        alpha = self.alpha.view(h, w)[y0:y1, x0:x1].reshape(-1)
        return self._replace(out=out, alpha=alpha, target=self.target[y0:y1, x0:x1].contiguous())

    def run(self, inner: Rectangle | None = None) -> Losses:
        h, w = self.target.shape[:2]
        results = results_of(self)
        results.loss.zero_()
        into(self, inner or (0, 0, w, h), results)
        return results


def rendering(
    height: int, width: int, dtype: torch.dtype = torch.float64, *, byte_target: bool = True, device: str = "cpu",
    background: tuple[float, ...] = BACKGROUND, seed: int = 0,
) -> Rendering:  # fmt: skip
    """Return a smooth image and a noisy rendering of it, some of which is too bright or too dark to be shown."""
    g = torch.Generator(device).manual_seed(seed)
    y, x = torch.linspace(0, 3, height, device=device)[:, None], torch.linspace(0, 4, width, device=device)[None]
    smooth = torch.stack(
        [torch.sin(3 * x).expand(height, width), torch.cos(2 * y).expand(height, width), (x * y).sin()]
    )
    smooth = smooth.permute(1, 2, 0).contiguous() * 0.4 + 0.5
    alpha = torch.rand(height * width, generator=g, device=device).to(dtype)
    shown = (smooth + torch.randn(smooth.shape, generator=g, device=device) * 0.15).view(-1, 3).to(dtype)
    behind = torch.tensor(background, dtype=dtype, device=device)
    target = (smooth * 255).to(torch.uint8)
    v = [torch.tensor(value, dtype=dtype, device=device) for value in (0.8, 0.3)]
    image = target if byte_target else (target.to(dtype) / 255).roll(1, 0)
    return Rendering(shown - (1 - alpha)[:, None] * behind, alpha, behind, image, *v)


def expected(r: Rendering) -> Losses:
    """Of a whole view, in float64 by autograd and pytorch_msssim's formula, from the very numbers of `r`."""
    h, w = r.target.shape[:2]
    out, alpha = r.out.double().requires_grad_(), r.alpha.double().requires_grad_()
    rgb = (out + (1 - alpha)[:, None] * r.background.double()).view(h, w, 3)
    rgb = rgb.clamp(0, 1) if r.clamp else rgb
    target = r.target.double() / (255 if r.target.dtype == torch.uint8 else 1)
    l1, ssim = (rgb - target).abs().sum(), 0 * rgb.sum()
    if min(h, w) > 10:
        module = SSIM(data_range=1.0, size_average=True, channel=3).double()
        tap = torch.arange(-5, 6, dtype=torch.float64).square().div(-2 * 1.5**2).exp()  # theirs are float32's
        module.win = (tap / tap.sum()).expand(3, 1, 1, 11).to(out.device)
        ssim = module(*(x.permute(2, 0, 1)[None] for x in (rgb, target))) * (3 * (h - 10) * (w - 10))
    loss = r.v_l1.double() * l1 + r.v_ssim.double() * ssim
    return Losses(rgb.detach(), loss.detach(), *torch.autograd.grad(loss, (out, alpha)))


def assert_near(actual: Tensor, wanted: Tensor, relative: float) -> None:
    """Near as a whole, and nowhere far off."""
    error = actual.double() - wanted.double()
    assert error.norm() <= relative * wanted.double().norm()
    if wanted.numel() > 1:
        assert error.abs().max() <= 10 * relative * wanted.double().abs().max()


def assert_bands_add_up(
    r: Rendering, wanted: Losses, cuts_x: tuple[int, ...], cuts_y: tuple[int, ...], halo: int, relative: float
) -> None:
    h, w = r.target.shape[:2]
    loss = torch.zeros((), dtype=torch.float64, device=r.out.device)
    v_out, v_alpha = torch.zeros_like(r.out).view(h, w, 3), torch.zeros_like(r.alpha).view(h, w)
    for x0, x1 in pairwise(cuts_x):
        for y0, y1 in pairwise(cuts_y):
            left, top, right, bottom = max(x0 - halo, 0), max(y0 - halo, 0), min(x1 + halo, w), min(y1 + halo, h)
            part = (slice(top, bottom), slice(left, right))
            found = r.cut(left, top, right, bottom).run((x0 - left, y0 - top, x1 - left, y1 - top))
            assert_near(found.rgb, wanted.rgb[part], min(relative, 1e-6))
            loss += found.loss
            # Every pixel's gradient comes from the rectangle that owns it, so other rectangles must add zero.
            v_out[part] += found.v_out.view(bottom - top, right - left, 3)
            v_alpha[part] += found.v_alpha.view(bottom - top, right - left)
            beyond = torch.ones(bottom - top, right - left, dtype=torch.bool, device=r.out.device)
            beyond[y0 - top : y1 - top, x0 - left : x1 - left] = False
            beyond = beyond.view(-1)
            assert not found.v_out[beyond].any() and not found.v_alpha[beyond].any()
    torch.testing.assert_close(loss, wanted.loss, rtol=max(relative / 10, 1e-10), atol=1e-9)
    assert_near(v_out.view(-1, 3), wanted.v_out, relative)
    assert_near(v_alpha.view(-1), wanted.v_alpha, relative)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("byte_target", [True, False], ids=["bytes", "floats"])
@pytest.mark.parametrize("dtype, relative", [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("height, width", [(40, 53), (11, 11), (12, 30), (8, 30), (30, 7)])
def test_of_a_whole_view(height: int, width: int, dtype: torch.dtype, relative: float, byte_target: bool) -> None:
    r = rendering(height, width, dtype, byte_target=byte_target)
    found, wanted = r.run(), expected(r)
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        assert_near(got, want, relative)
    assert 0.01 < (wanted.v_out == 0).double().mean() < 0.5 and wanted.v_alpha.count_nonzero() > 0


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("halo", [10, 16])
@pytest.mark.parametrize(
    "cuts_x, cuts_y",
    [((0, 40), (0, 16, 32, 47)), ((0, 40), (0, 1, 2, 5, 46, 47)), ((0, 3, 20, 40), (0, 16, 47))],
    ids=["bands", "thin bands", "blocks"],
)
def test_rectangles_add_up_to_the_view(cuts_x: tuple[int, ...], cuts_y: tuple[int, ...], halo: int) -> None:
    r = rendering(47, 40)
    assert_bands_add_up(r, expected(r), cuts_x, cuts_y, halo, 1e-10)


def test_halo_needs_ten_pixels() -> None:
    """Else the sums are still right, and the gradient near the cut is not."""
    r = rendering(40, 30)
    wanted = expected(r)
    for halo, right in ((10, True), (9, False), (5, False)):
        found = r.cut(0, 0, 30, 20 + halo).run((0, 0, 30, 20))
        rest = r.cut(0, 20 - halo, 30, 40).run((0, halo, 30, 20 + halo))
        torch.testing.assert_close(found.loss + rest.loss, wanted.loss, rtol=1e-10, atol=0)
        assert torch.allclose(found.v_out[: 20 * 30], wanted.v_out[: 20 * 30], rtol=1e-9, atol=1e-12) == right


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("inner", [(0, 0, 0, 0), (5, 9, 5, 14), (0, 20, 22, 20), (22, 20, 22, 20)])
def test_rectangle_without_own_pixels_is_composited_only(inner: Rectangle) -> None:
    r = rendering(20, 22)
    found = r.run(inner)
    assert torch.equal(found.rgb.view(-1, 3), composite(*r[:3]))
    assert not any(t.any() for t in found[1:])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("device", DEVICES)
def test_an_empty_rectangle(device: str) -> None:
    found = rendering(0, 5, torch.float32, device=device).run()
    assert [tuple(t.shape) for t in found] == [(0, 5, 3), (), (0, 3), (0,)] and found.loss == 0


@pytest.mark.usefixtures("native")
def test_is_what_the_other_operators_give() -> None:
    r = rendering(33, 41, torch.float32)
    leaves = (r.out.clone().requires_grad_(), r.alpha.clone().requires_grad_())
    rgb = composite(*leaves, r.background).view(33, 41, 3)
    l1, ssim, _ = l1_ssim(rgb, r.target, (0, 0, 41, 33))
    loss = r.v_l1 * l1 + r.v_ssim * ssim
    for got, want in zip(r.run(), (rgb, loss, *torch.autograd.grad(loss, leaves)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_clamped_colours_have_no_gradient() -> None:
    r = rendering(20, 22, torch.float32)
    r.out[100], r.alpha[100] = torch.tensor([-0.1, 1.1, 1.0]), 1.0
    r.out[200], r.alpha[200] = torch.tensor([0.0, 0.5, float("nan")]), 1.0
    found = r.run()
    assert found.v_out[100, 0] == 0 and found.v_out[100, 1] == 0 and found.v_out[200, 2] == 0
    assert found.rgb.view(-1, 3)[100].tolist() == [0, 1, 1] and found.rgb.view(-1, 3)[200, 2].isnan()
    assert found.loss.isnan()  # what has gone wrong shows
    assert bool(found.v_out[r.out.isnan().roll(1, 0)].isnan().all())
    clean = r._replace(out=r.out.nan_to_num(0.5)).run()
    assert clean.v_out[100, 2] != 0 and clean.v_out[200, 0] != 0 and bool(clean.v_out.isfinite().all())


def results_of(r: Rendering) -> Losses:
    """Return buffers for `into`, with a loss to add to."""
    shapes = (r.target.shape, r.out.shape, r.alpha.shape)
    rgb, v_out, v_alpha = (torch.empty(shape, dtype=r.out.dtype, device=r.out.device) for shape in shapes)
    return Losses(rgb, torch.full_like(r.v_l1, 2), v_out, v_alpha)


def into(
    r: Rendering, inner: Rectangle, results: Losses, last: Tensor | None = None, offset: float = 0.0, scale: float = 1.0
) -> None:
    """Write `band_loss_into`'s results of one rectangle."""
    rgb, loss, v_out, v_alpha = results
    band = Band(r.target, inner, r.background, r.v_l1, r.v_ssim, rgb, loss, offset)
    band_loss_into(r.out, r.alpha, [band], scale=scale, v_out=v_out, v_alpha=v_alpha, last=last, clamp=r.clamp)


def assert_losses_are_scaled_and_added(r: Rendering, inner: Rectangle) -> None:
    """And `last` is marked beyond the own pixels."""
    h, w = r.target.shape[:2]
    results = results_of(r)
    last = torch.arange(h * w, dtype=torch.int32, device=r.out.device)
    wanted = r.run(inner)
    for _ in range(2):
        into(r, inner, results, last, 0.25, 4.0)
    for name in ("rgb", "v_out", "v_alpha"):
        assert torch.equal(getattr(results, name), getattr(wanted, name))
    torch.testing.assert_close(results.loss, 2 + 2 * (0.25 + 4.0 * wanted.loss), rtol=1e-5, atol=0)
    own = torch.zeros(h, w, dtype=torch.bool, device=last.device)
    own[inner[1] : inner[3], inner[0] : inner[2]] = True
    assert torch.equal(last, torch.where(own.view(-1), torch.arange(h * w, device=last.device), -1).int())


def assert_many_at_once(renderings: Sequence[Rendering]) -> None:
    """Rectangles at once have the results of each alone; all but the first share a loss."""
    inners = [(k % 3, 0, r.target.shape[1], r.target.shape[0] - k % 2) for k, r in enumerate(renderings)]
    results = [results_of(r) for r in renderings]
    out, alpha = (torch.cat([r[k] for r in renderings]) for k in range(2))
    v_out, v_alpha, last = torch.empty_like(out), torch.empty_like(alpha), torch.zeros_like(alpha, dtype=torch.int32)
    bands = [
        Band(r.target, i, r.background, r.v_l1, r.v_ssim, found.rgb, results[min(k, 1)].loss, 0.5 * k)
        for k, (r, i, found) in enumerate(zip(renderings, inners, results, strict=True))
    ]
    band_loss_into(out, alpha, bands, scale=2.0, v_out=v_out, v_alpha=v_alpha, last=last)
    start, losses = 0, [2.0, 2.0]
    for k, (r, inner, found) in enumerate(zip(renderings, inners, results, strict=True)):
        wanted, piece = r.run(inner), slice(start, start + len(r.out))
        start = piece.stop
        losses[min(k, 1)] += 0.5 * k + 2.0 * float(wanted.loss)
        assert_near(v_out[piece], wanted.v_out, 1e-6)
        assert_near(v_alpha[piece], wanted.v_alpha, 1e-6)
        assert torch.equal(found.rgb, wanted.rgb)
        width, height = inner[2] - inner[0], inner[3] - inner[1]
        assert (
            int((last[piece] == 0).sum()) == width * height
            and int((last[piece] == -1).sum()) == len(r.out) - width * height
        )
    for loss, wanted_loss in zip((results[0].loss, results[1].loss), losses, strict=True):
        assert float(loss) == pytest.approx(wanted_loss, rel=1e-5)


def test_many_at_once() -> None:
    assert_many_at_once([rendering(20 + k, 33 - k, seed=k) for k in range(5)])


@pytest.mark.usefixtures("either")
def test_colours_that_are_not_clamped() -> None:
    r = rendering(40, 53)._replace(clamp=False)
    found, wanted = r.run(), expected(r)
    assert found.rgb.min() < 0 and found.rgb.max() > 1 and found.v_out.all()
    for got, want in zip(found, wanted, strict=True):
        assert_near(got, want, 1e-10)
    assert_losses_are_scaled_and_added(r, (4, 0, 53, 40))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inner", [(0, 0, 141, 133), (0, 12, 141, 20), (4, 0, 141, 133), (7, 7, 7, 7)])
def test_into_given_tensors(inner: Rectangle, device: str) -> None:
    r = rendering(133, 141, torch.float32, device=device)
    assert_losses_are_scaled_and_added(r, inner)
    into(r, inner, results_of(r))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    r = rendering(20, 22, torch.float32, device=device)
    r.run()  # makes sure that the operators are loaded
    rgb, loss, v_out, v_alpha = results_of(r)
    last = torch.zeros(20 * 22, dtype=torch.int32, device=device)
    many = (r.out, r.alpha, [r.background], [r.target], [2, 0, 22, 18], [r.v_l1], [r.v_ssim], [0.5], 2.0)
    torch.library.opcheck(OPS.band_loss_into.default, (*many, [rgb], [loss], v_out, v_alpha, last))
    torch.library.opcheck(OPS.band_loss_into.default, (*many, [rgb], [loss], v_out, v_alpha))
