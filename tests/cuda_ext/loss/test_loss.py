"""`l1_ssim`: pytorch_msssim's value and gradient on whole images, and the same sums from patches."""

from itertools import pairwise

import pytest
import torch
from pytorch_msssim import SSIM
from torch import Tensor

from cuda_ext import l1_ssim, use_reference
from tests.lib.ranks import DEVICES
from tests.lib.threads import same_on_threads

pytestmark = pytest.mark.usefixtures("native")


def images(height: int, width: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a smooth byte image and a noisy rendering of it."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 4, width), indexing="ij")
    smooth = torch.stack([torch.sin(3 * x), torch.cos(2 * y), torch.sin(x * y)], dim=-1) * 0.4 + 0.5
    noise = torch.randn(height, width, 3, generator=generator) * 0.08
    return (smooth + noise).to(dtype).clamp(0, 1), (smooth * 255).to(torch.uint8)


def whole(tensor: Tensor) -> tuple[int, int, int, int]:
    return 0, 0, tensor.shape[1], tensor.shape[0]


def backward(pred: Tensor, target: Tensor, inner: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both sums, dssim_dpred, and the gradient of 0.8 l1 - 0.3 ssim."""
    leaf = pred.clone().requires_grad_()
    l1_sum, ssim_sum, dssim = l1_ssim(leaf, target, inner)
    (gradient,) = torch.autograd.grad(0.8 * l1_sum - 0.3 * ssim_sum, leaf)
    return l1_sum.detach(), ssim_sum.detach(), dssim, gradient


def in_patches(pred: Tensor, target: Tensor, cuts_x: tuple[int, ...], cuts_y: tuple[int, ...]) -> list[Tensor]:
    """Return both sums and the gradient of patches with a halo, added up, and those of the whole image."""
    height, width = pred.shape[:2]
    l1_sum, ssim_sum, _, expected = backward(pred, target, whole(pred))
    total, sums = torch.zeros_like(pred), pred.new_zeros(2)
    for x0, x1 in pairwise(cuts_x):
        for y0, y1 in pairwise(cuts_y):
            left, top = max(x0 - 5, 0), max(y0 - 5, 0)
            part = (slice(top, min(y1 + 5, height)), slice(left, min(x1 + 5, width)))
            inner = (x0 - left, y0 - top, x1 - left, y1 - top)
            part_l1, part_ssim, _, gradient = backward(pred[part], target[part], inner)
            sums += torch.stack([part_l1, part_ssim])
            total[part] += gradient
    return [sums, total, torch.stack([l1_sum, ssim_sum]), expected]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("height, width", [(40, 53), (11, 11), (11, 12), (64, 30)])
def test_whole_image_equals_pytorch_msssim(height: int, width: int, dtype: torch.dtype) -> None:
    pred, target = images(height, width, dtype)
    l1_sum, ssim_sum, dssim, gradient = backward(pred, target, whole(pred))
    leaf, floats = pred.clone().requires_grad_(), target.to(dtype) / 255
    count = 3 * (height - 10) * (width - 10)
    module = SSIM(data_range=1.0, size_average=True, channel=3)
    ssim = module(leaf.permute(2, 0, 1)[None], floats.permute(2, 0, 1)[None]) * count
    l1 = (leaf - floats).abs().sum()
    (expected_dssim,) = torch.autograd.grad(ssim, leaf, retain_graph=True)
    (expected,) = torch.autograd.grad(0.8 * l1 - 0.3 * ssim, leaf)
    # pytorch_msssim keeps its window in float32 also for float64 images, which is worth 1e-7.
    torch.testing.assert_close(ssim_sum, ssim.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(l1_sum, l1.detach(), rtol=1e-6, atol=1e-6)
    tolerance = 2e-4 if dtype == torch.float32 else 1e-5
    for actual, wanted in ((dssim, expected_dssim), (gradient, expected)):
        assert (actual - wanted).norm() <= tolerance * wanted.norm() and wanted.count_nonzero() > 0.9 * wanted.numel()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("inner", [(0, 0, 37, 29), (3, 5, 31, 22), (8, 9, 9, 10), (36, 0, 37, 29)])
def test_native_equals_reference(inner: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float) -> None:
    pred, target = images(29, 37, dtype)
    native = l1_ssim(pred, target, inner)
    with use_reference():
        reference = l1_ssim(pred, target, inner)
    assert reference[0] > 0
    for actual, expected in zip(native, reference, strict=True):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("target_type", [torch.uint8, torch.float64])
def test_gradcheck(target_type: torch.dtype) -> None:
    pred, target = images(13, 14)
    target = target if target_type == torch.uint8 else target.double() / 255

    def run(leaf: Tensor) -> tuple[Tensor, Tensor]:
        return l1_ssim(leaf, target, (1, 2, 14, 12))[:2]

    assert torch.autograd.gradcheck(run, (pred.requires_grad_(),), eps=1e-7, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    "cuts_x, cuts_y",
    [((0, 40), (0, 31)), ((0, 1, 17, 18, 40), (0, 3, 29, 31)), ((0, 6, 40), (0, 25, 31))],
    ids=["whole", "3x4", "2x2"],
)
def test_patches_with_halo_add_up_to_the_image(cuts_x: tuple[int, ...], cuts_y: tuple[int, ...]) -> None:
    pred, target = images(31, 40)
    sums, total, wanted, expected = in_patches(pred, target, cuts_x, cuts_y)
    torch.testing.assert_close(sums, wanted, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-11)
    assert wanted[1].abs() > 10 and expected.count_nonzero() > 0.9 * expected.numel()


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_are_255ths(dtype: torch.dtype) -> None:
    pred, target = images(20, 22, dtype)
    from_bytes = backward(pred, target, whole(pred))
    from_floats = backward(pred, target.to(dtype) / 255, whole(pred))
    assert all(torch.equal(a, b) for a, b in zip(from_bytes, from_floats, strict=True))


@pytest.mark.usefixtures("either")
def test_a_perfect_image() -> None:
    _, target = images(20, 22, torch.float32)
    l1_sum, ssim_sum, _, gradient = backward(target.float() / 255, target, whole(target))
    assert l1_sum == 0 and ssim_sum.item() == pytest.approx(3 * 10 * 12, rel=1e-5)
    assert gradient.abs().max() < 1e-3  # the sign of zero is zero, and SSIM is at its maximum


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inner", [(4, 4, 4, 15), (0, 0, 0, 0), (22, 20, 22, 20)])
def test_an_empty_inner_rectangle_adds_nothing(inner: tuple[int, int, int, int], device: str) -> None:
    pred, target = (x.to(device) for x in images(20, 22, torch.float32))
    for tensor in (*backward(pred, target, inner), *backward(pred[:3, :4], target[:3, :4], (0, 0, 0, 3))):
        assert not tensor.any()


def test_the_number_of_threads_changes_no_bit() -> None:
    pred, target = images(150, 170, torch.float32)
    same_on_threads(lambda: backward(pred, target, whole(pred)))


@pytest.mark.parametrize("device", DEVICES)
def test_not_contiguous_images(device: str) -> None:
    pred, target = (x.to(device) for x in images(20, 22, torch.float32))
    results = backward(pred, target, whole(pred))
    strided = backward(*(x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (pred, target)), whole(pred))
    assert all(torch.equal(a, b) for a, b in zip(results, strided, strict=True))


def test_wrong_arguments_are_named() -> None:
    pred, target = images(20, 22, torch.float32)
    with pytest.raises(ValueError, match="at least 11 px"):
        l1_ssim(pred[:, :10], target[:, :10], (0, 0, 10, 20))
    with pytest.raises(ValueError, match="height 10"):
        l1_ssim(pred[:10], target[:10], (0, 0, 22, 10))
    with pytest.raises(ValueError, match="one size"):
        l1_ssim(pred, target[:, :21], (0, 0, 22, 20))
    with pytest.raises(ValueError, match="inner"):
        l1_ssim(pred, target, (0, 0, 23, 20))
    with pytest.raises(TypeError, match="uint8"):
        l1_ssim(pred, target.double(), (0, 0, 22, 20))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    pred, target = (x.to(device) for x in images(20, 22, torch.float32))
    inner, one = [2, 0, 22, 18], torch.ones((), device=device)
    l1_ssim(pred, target, whole(pred))  # makes sure that the operator is loaded
    for given in (target, target.float() / 255):
        torch.library.opcheck(torch.ops.ns_multigpu.l1_ssim.default, (pred.clone().requires_grad_(), given, inner))
    backward_inputs = (pred, target, torch.randn_like(pred), inner, one, one)
    torch.library.opcheck(torch.ops.ns_multigpu.l1_ssim_backward.default, backward_inputs)
