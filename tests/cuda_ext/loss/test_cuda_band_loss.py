"""`band_loss_into` on the GPU: the fp64 gradient of the whole view's loss, from bands as from whole views."""

import pytest
import torch
from torch import Tensor

from cuda_ext import use_reference
from tests.cuda_ext.graphs import captured
from tests.cuda_ext.loss.test_band_loss import (
    Losses,
    Rectangle,
    Rendering,
    assert_bands_add_up,
    assert_losses_are_scaled_and_added,
    assert_many_at_once,
    assert_near,
    expected,
    into,
    rendering,
    results_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("native")]


def on_gpu(height: int, width: int, **options: object) -> Rendering:
    return rendering(height, width, torch.float32, device="cuda", **options)  # type: ignore[arg-type]


def clear(r: Rendering) -> Rendering:
    """Without the colours that float32 may round to the other side of a bound or of the target's."""
    h, w = r.target.shape[:2]
    value = r.out.double() + (1 - r.alpha.double())[:, None] * r.background.double()
    target = (r.target.double() / (255 if r.target.dtype == torch.uint8 else 1)).view(h * w, 3)
    unclear = (value.clamp(0, 1) - target).abs() < 2e-6
    unclear &= (value > 0) & (value < 1)
    unclear |= (value.abs() < 1e-6) | ((value - 1).abs() < 1e-6)
    assert unclear.sum() <= max(1, 1e-3 * unclear.numel())
    return r._replace(out=torch.where(unclear, r.out + 1e-3, r.out))


def assert_is(found: Losses, wanted: Losses) -> None:
    for got, want, relative in zip(found, wanted, (1e-6, 1e-5, 1e-4, 1e-4), strict=True):
        assert got.is_cuda and got.dtype == torch.float32 and got.shape == want.shape
        assert_near(got, want, relative)


@pytest.mark.parametrize("byte_target", [True, False], ids=["bytes", "floats"])
@pytest.mark.parametrize("background", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.2, 0.1, 0.9)])
@pytest.mark.parametrize(
    "height, width",
    [(11, 11), (11, 12), (12, 11), (60, 71), (23, 200), (300, 74), (75, 75), (131, 149), (8, 30), (30, 7), (1, 1)],
)
def test_of_a_whole_view(height: int, width: int, background: tuple[float, ...], byte_target: bool) -> None:
    r = clear(on_gpu(height, width, background=background, byte_target=byte_target, seed=height + width))
    assert_is(r.run(), expected(r))
    assert_near(r.run().v_out, composed(r, (0, 0, width, height)).v_out, 1e-4)


def composed(r: Rendering, inner: Rectangle) -> Losses:
    with use_reference():
        return r.run(inner)


@pytest.mark.parametrize("byte_target", [True, False], ids=["bytes", "floats"])
@pytest.mark.parametrize("height, width", [(1062, 1894), (2160, 3840)])
def test_large_views(height: int, width: int, byte_target: bool) -> None:
    r = clear(on_gpu(height, width, byte_target=byte_target))
    wanted = expected(r)
    assert_is(r.run(), wanted)
    assert wanted.v_out.count_nonzero() > 0.5 * wanted.v_out.numel()


@pytest.mark.parametrize("halo", [10, 16])
@pytest.mark.parametrize(
    "cuts_x, cuts_y",
    [
        ((0, 190), (0, 64, 144, 160, 291)),
        ((0, 190), (0, 1, 2, 5, 16, 280, 290, 291)),
        ((0, 74, 148, 190), (0, 16, 291)),
        ((0, 1, 75, 190), (0, 100, 291)),
    ],
    ids=["bands", "thin bands", "strips", "blocks"],
)
def test_rectangles_add_up_to_the_view(cuts_x: tuple[int, ...], cuts_y: tuple[int, ...], halo: int) -> None:
    r = clear(on_gpu(291, 190))
    assert_bands_add_up(r, expected(r), cuts_x, cuts_y, halo, 1e-4)


def test_bands_of_a_large_view_add_up_to_it() -> None:
    r = clear(on_gpu(1062, 1894))
    assert_bands_add_up(r, expected(r), (0, 1894), (0, 16, 528, 544, 1062), 16, 1e-4)


@pytest.mark.parametrize("inner", [(0, 0, 0, 0), (5, 9, 5, 14), (0, 20, 90, 20), (90, 40, 90, 40)])
def test_rectangle_without_own_pixels_is_composited_only(inner: Rectangle) -> None:
    r = on_gpu(40, 90)
    found = r.run(inner)
    assert_near(found.rgb, composed(r, inner).rgb, 1e-6)
    assert not any(t.any() for t in found[1:])


def test_runs_repeat_bit_for_bit() -> None:
    r = on_gpu(700, 900)
    first = r.run((0, 30, 900, 690))
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, r.run((0, 30, 900, 690)), strict=True))


def test_gradient_is_bitwise_independent_of_the_cuts() -> None:
    r = on_gpu(400, 500)
    whole, band = r.run(), r.cut(0, 84, 500, 316).run((0, 16, 500, 216))
    own = slice(100 * 500, 300 * 500)
    assert torch.equal(whole.v_out[own], band.v_out[16 * 500 : 216 * 500])
    assert torch.equal(whole.v_alpha[own], band.v_alpha[16 * 500 : 216 * 500])


def test_a_perfect_image() -> None:
    r = on_gpu(60, 90)
    shown = (r.target.cpu().float() / 255).view(-1, 3).cuda()
    r = r._replace(out=shown, alpha=torch.ones_like(r.alpha))
    found, none = r.run(), torch.zeros_like(r.v_l1)
    assert r._replace(v_ssim=none).run().loss == 0
    assert float(r._replace(v_l1=none).run().loss) == pytest.approx(float(r.v_ssim) * 3 * 50 * 80, rel=1e-5)
    assert found.v_out.abs().max() < 1e-3  # the sign of zero is zero, and SSIM is at its maximum


def test_clamped_colours_have_no_gradient() -> None:
    r = on_gpu(60, 90)
    r.out[2500], r.alpha[2500] = torch.tensor([-0.1, 1.1, 1.0], device="cuda"), 1.0
    r.out[3500], r.alpha[3500] = torch.tensor([0.0, 0.5, float("nan")], device="cuda"), 1.0
    found = r.run()
    assert found.v_out[2500, :2].tolist() == [0, 0] and found.v_out[3500, 2] == 0
    assert found.v_out[2500, 2] != 0 and found.v_out[3500, 0] != 0
    assert found.loss.isnan()
    # Pixel 3500 is in row 38, column 80: windows that hold it spread it over ten pixels, up to the border.
    near = torch.zeros(60, 90, 3, dtype=torch.bool, device="cuda")
    near[28:49, 70:90, 2] = True
    assert torch.equal(found.v_out.view(60, 90, 3).isnan(), near & (found.rgb > 0) & (found.rgb < 1))
    assert found.rgb.isnan().sum() == 1 and found.rgb[38, 80, 2].isnan()


@pytest.mark.parametrize("count", [2, 16, 35])
def test_many_at_once(count: int) -> None:
    """More than a launch takes, too, of sizes from a window to several strips."""
    assert_many_at_once([on_gpu(12 + 9 * k, 300 - 8 * k, seed=k) for k in range(count)])


def test_colours_that_are_not_clamped() -> None:
    r = on_gpu(133, 149)._replace(clamp=False)
    assert r.run().rgb.max() > 1
    assert_is(r.run(), expected(r))
    assert_losses_are_scaled_and_added(r, (4, 0, 149, 120))


def test_into_slices_of_several_views() -> None:
    """Slices start anywhere, and memory around them is unchanged."""
    r = on_gpu(37, 41)
    wanted = r.run()
    buffers = [torch.full((3 * 37 * 41 + 2, 3), 7.0, device="cuda"), torch.full((3 * 37 * 41 + 2,), 7.0, device="cuda")]
    for start in (0, 37 * 41 + 1):
        views = [t[start : start + 37 * 41] for t in buffers]
        results = results_of(r)._replace(v_out=views[0], v_alpha=views[1])
        into(r, (0, 0, 41, 37), results)
        assert torch.equal(views[0], wanted.v_out) and torch.equal(views[1], wanted.v_alpha)
    for t in buffers:
        assert (t[37 * 41] == 7).all() and (t[2 * 37 * 41 + 1 :] == 7).all()


def test_not_contiguous_images() -> None:
    r = on_gpu(40, 52)
    strided = r._replace(
        out=r.out.T.contiguous().T, target=r.target.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        alpha=torch.stack([r.alpha, r.alpha], 1)[:, 0],
    )  # fmt: skip
    assert not strided.out.is_contiguous() and not strided.alpha.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(r.run(), strided.run(), strict=True))


def test_a_cuda_graph_holds_it() -> None:
    r = on_gpu(64, 180)
    inner = (0, 16, 180, 48)
    results = results_of(r)

    def step() -> tuple[Tensor, ...]:
        into(r, inner, results, None, 0.5, 2.0)
        return r.run(inner)

    graph, kept = captured(step)
    for shift in (0.0, 0.1):
        r.out.add_(shift)
        r.v_l1.add_(shift)
        results.loss.zero_()
        graph.replay()
        found = [t.clone() for t in results]
        results.loss.zero_()
        assert all(torch.equal(a, b) for a, b in zip(kept, step(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found, results, strict=True))


def test_float64_is_named() -> None:
    with pytest.raises(TypeError, match="float32"):
        rendering(20, 22, device="cuda").run()
