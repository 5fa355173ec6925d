"""`rasterize`: the compositing rule, its gradients, and that neither patches nor threads change them."""

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cuda_ext import rasterize, use_reference
from tests.cuda_ext.splats import (
    assert_close_but_few,
    assert_gradient_close,
    backward,
    composite_slowly,
    make_splats,
    pixel_ids,
)
from tests.lib.ranks import DEVICES
from tests.lib.threads import same_on_threads

pytestmark = pytest.mark.usefixtures("native")

# Patches that tile a 47x33 view without a halo: odd origins, no side a multiple of 16, one of a single pixel column.
PATCHES = (0, 0, 0, 19, 33, 0, 19, 0, 20, 33, 0, 20, 0, 47, 7, 0, 20, 7, 47, 33)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_rule_pixel_by_pixel(dtype: torch.dtype) -> None:
    splats = make_splats(500, 23, 18, views=2, opacities=(0.05, 1.0), channels=4, dtype=dtype)
    splats = replace(splats, depths=(splats.depths * 8).round() / 8)  # many ties
    splats = splats.with_patches(0, 0, 0, 23, 18, 1, 3, 1, 20, 18)
    colors, alphas, blended = composite_slowly(splats)
    _, rows = splats.intersect()
    out, alpha, last = splats.render()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert_close_but_few(out.double(), colors, tolerance, tolerance, fraction=2e-3)
    assert_close_but_few(alpha.double(), alphas, tolerance, tolerance, fraction=2e-3)
    wanted = torch.tensor([hits[-1] if hits else -1 for hits in blended])
    found = torch.where(last >= 0, rows[last.long()], -1)
    assert (found != wanted).float().mean() <= 2e-3
    assert bool((wanted >= 0).any()) and bool((alphas > 0.999).any()) and max(map(len, blended)) > 8


@pytest.mark.parametrize("channels", [1, 3, 4, 5, 8])
@pytest.mark.parametrize(
    "sizes", [(0.5, 4.0), (0.0, 0.1), (40.0, 200.0), (0.01, 15.0)], ids=["mixed", "sub-pixel", "huge", "needles"]
)
def test_native_equals_reference_in_float32(sizes: tuple[float, float], channels: int) -> None:
    splats = make_splats(400, 47, 33, sizes=sizes, channels=channels, opacities=(0.02, 0.99))
    (out, alpha, _), gradients = backward(splats)
    with use_reference():
        (out_, alpha_, _), gradients_ = backward(splats)
    assert alpha_.count_nonzero() > 100
    assert_close_but_few(out, out_, 1e-5, 1e-5)
    assert_close_but_few(alpha, alpha_, 1.3e-6, 1e-5)
    for actual, expected in zip(gradients, gradients_, strict=True):
        assert (expected != 0).float().mean() > 0.005
        assert_gradient_close(actual, expected, 1e-3 if sizes[1] < 100 else 3e-3)


@pytest.mark.parametrize("channels", [3, 4, 2])
def test_native_equals_reference_in_float64(channels: int) -> None:
    splats = make_splats(300, 47, 33, channels=channels, opacities=(0.02, 1.0), dtype=torch.float64)
    outputs, gradients = backward(splats)
    with use_reference():
        outputs_, gradients_ = backward(splats)
    assert gradients_[0].count_nonzero() > 300
    for actual, expected in zip([*outputs[:2], *gradients], [*outputs_[:2], *gradients_], strict=True):
        # T is recovered in backward as 1 - alpha, which leaves 1e-12 of it where T is 1e-4.
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("channels", [3, 1])
def test_gradcheck(channels: int) -> None:
    # Opacities that keep every pixel clear of the thresholds, where the function jumps.
    splats = make_splats(
        6, 9, 7, sizes=(2.0, 3.0), opacities=(0.3, 0.8), channels=channels, dtype=torch.float64, seed=3
    ).leaves()
    lists = splats.intersect()
    probe = torch.zeros_like(splats.means2d)

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, alpha, _ = rasterize(*inputs, *lists, splats.patches, 16, probe.requires_grad_())
        return out, alpha

    assert torch.autograd.gradcheck(run, splats.inputs(), eps=1e-7, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("either")
def test_probe_gets_the_sum_of_absolute_gradients_over_pixels() -> None:
    splats = make_splats(12, 7, 6, sizes=(1.0, 3.0), dtype=torch.float64)
    _, gradients = backward(splats)
    total = torch.zeros_like(splats.means2d)
    for pixel in range(7 * 6):
        weight = torch.zeros(7 * 6, dtype=torch.float64)
        weight[pixel] = 1
        total += backward(splats, weight=weight)[1][0].abs()
    torch.testing.assert_close(gradients[4], total, rtol=1e-9, atol=1e-12)
    assert bool((gradients[4] >= gradients[0].abs() - 1e-12).all())
    assert gradients[4].max() > 2 * gradients[0].abs().max()


@pytest.mark.usefixtures("either")
def test_probe_changes_no_other_output() -> None:
    splats = make_splats(100, 30, 20).leaves()
    with_probe = splats.render(torch.zeros(100, 2, requires_grad=True))
    without = splats.render()
    assert all(torch.equal(a, b) for a, b in zip(with_probe, without, strict=True))
    gradients = [torch.autograd.grad(out.sum(), splats.inputs()[:3]) for out in (with_probe[0], without[0])]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_patches_give_the_whole_views_pixels_and_gradients(either: str, dtype: torch.dtype) -> None:
    whole = make_splats(300, 47, 33, opacities=(0.02, 1.0), dtype=dtype)
    in_patches, ids = whole.with_patches(*PATCHES), pixel_ids(PATCHES)
    assert sorted(ids.tolist()) == list(range(47 * 33))
    leaves = [splats.leaves() for splats in (whole, in_patches)]
    probes = [torch.zeros(300, 2, dtype=dtype, requires_grad=True) for _ in leaves]
    (out, alpha, _), (cut_out, cut_alpha, _) = (s.render(p) for s, p in zip(leaves, probes, strict=True))
    v_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    inputs = [[*s.inputs(), p] for s, p in zip(leaves, probes, strict=True)]
    gradients = torch.autograd.grad([out, alpha], inputs[0], [v_out, v_out[:, 0]])
    cut = torch.autograd.grad([cut_out, cut_alpha], inputs[1], [v_out[ids], v_out[ids, 0]])
    if either == "native":
        assert torch.equal(cut_out, out[ids]) and torch.equal(cut_alpha, alpha[ids])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(cut_out, out[ids], rtol=tolerance, atol=tolerance)
    for actual, expected in zip(cut, gradients, strict=True):
        assert_gradient_close(actual, expected, tolerance)


def test_a_patch_with_a_halo_shows_the_same_pixels() -> None:
    whole = make_splats(300, 47, 33)
    out, alpha, _ = whole.render()
    patches = (0, 6, 2, 29, 22, 0, 19, 12, 47, 33)  # they overlap
    ids = pixel_ids(patches)
    cut_out, cut_alpha, _ = whole.with_patches(*patches).render()
    assert torch.equal(cut_out, out[ids]) and torch.equal(cut_alpha, alpha[ids])


@pytest.mark.usefixtures("either")
def test_capped_alpha_has_feature_gradients_only() -> None:
    splats = make_splats(1, 1, 1, dtype=torch.float64)
    splats = replace(splats, means2d=splats.means2d * 0 + 0.4, row_opacities=torch.full((1,), 0.9999).double())
    splats = replace(splats, conics=torch.tensor([[1e-3, 0.0, 1e-3]]).double())
    (out, alpha, _), gradients = backward(splats)
    _, below = backward(replace(splats, row_opacities=splats.row_opacities * 0.99))
    assert alpha.item() == pytest.approx(0.999, abs=1e-12)
    torch.testing.assert_close(out, 0.999 * splats.features)
    assert all(gradients[k].count_nonzero() == 0 for k in (0, 1, 2, 4)) and gradients[3].count_nonzero() == 3
    assert all(gradient.count_nonzero() > 0 for gradient in below)


@pytest.mark.usefixtures("either")
def test_a_pixel_closes_before_the_splat_that_would_darken_it() -> None:
    splats = make_splats(6, 4, 4, sizes=(100.0, 101.0), dtype=torch.float64)
    splats = replace(
        splats,
        means2d=torch.full((6, 2), 2.0).double(),
        row_opacities=torch.tensor([0.9, 0.9, 0.9, 0.95, 0.2, 0.3]).double(),  # T: 0.1, 0.01, 1e-3, then 5e-5: closed
        depths=torch.arange(6).double(),
    )
    (_, alpha, last), gradients = backward(splats)
    assert bool((last == 2).all()) and bool(((alpha > 0.998) & (alpha < 0.9999)).all())
    assert all(bool((gradient[:3] != 0).any()) and bool((gradient[3:] == 0).all()) for gradient in gradients)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_visible(device: str) -> None:
    some = make_splats(5, 20, 18).to(device)
    cases = [
        make_splats(0, 20, 18).to(device),
        replace(some, radii=torch.zeros_like(some.radii)),
        replace(some, means2d=some.means2d + 1000),
        some.with_patches(0, 3, 3, 3, 9),
        some.with_patches(),
    ]
    for splats in cases:
        pixels = 20 * 18 if splats.patches == some.patches else 0
        (out, alpha, last), gradients = backward(splats)
        assert out.shape == (pixels, 3) and alpha.shape == (pixels,) and last.shape == (pixels,)
        assert not out.any() and not alpha.any() and bool((last == -1).all())
        for gradient, tensor in zip(gradients, [*splats.inputs(), splats.means2d], strict=True):
            assert gradient.shape == tensor.shape and not gradient.any()


def test_one_tile_with_a_hundred_thousand_splats() -> None:
    splats = make_splats(100_000, 16, 16, sizes=(0.3, 3.0), opacities=(0.004, 0.006))
    start = time.process_time()
    (out, alpha, last), gradients = backward(splats)
    assert time.process_time() - start < 20
    assert bool((alpha > 0.99).all()) and int(last.max()) > 5_000
    assert bool(out.isfinite().all()) and all(bool(g.isfinite().all()) and bool(g.any()) for g in gradients)
    nearest = splats.intersect()[1][: int(last.max()) + 1].long()
    behind = torch.ones(100_000, dtype=torch.bool)
    behind[nearest] = False
    assert all(not gradient[behind].any() for gradient in gradients)


def test_the_number_of_threads_changes_no_bit() -> None:
    splats = make_splats(5_000, 150, 110)
    same_on_threads(lambda: [tensor for part in backward(splats) for tensor in part])


def test_conics_that_are_not_positive_definite_follow_the_rule() -> None:
    splats = make_splats(3, 20, 20)
    conics = torch.tensor([[0.01, 0.0, -0.001], [0.0, 0.0, 0.0], [0.01, 0.02, 0.01]])
    radii = torch.full((3, 2), 1000, dtype=torch.int32)
    splats = replace(splats, means2d=torch.full((3, 2), 10.0), conics=conics, radii=radii)
    colors, alphas, _ = composite_slowly(splats)
    out, alpha, _ = splats.render()
    assert_close_but_few(out.double(), colors, 1e-5, 1e-5, fraction=0.01)
    assert_close_but_few(alpha.double(), alphas, 1e-5, 1e-5, fraction=0.01)
    assert alphas.count_nonzero() > 100
