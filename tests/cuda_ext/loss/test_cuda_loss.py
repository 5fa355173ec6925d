"""`l1_ssim` on the GPU: value and gradient of the fp64 reference, from patches as from whole images."""

import pytest
import torch
from torch import Tensor

from cuda_ext import l1_ssim, use_reference
from tests.cuda_ext.graphs import check_replays
from tests.cuda_ext.loss.test_loss import backward, images, in_patches, whole

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("native")]
Rectangle = tuple[int, int, int, int]


def assert_near(actual: Tensor, expected: Tensor, relative: float) -> None:
    """Near as a whole, and nowhere far off."""
    error = actual.double().cpu() - expected.double().cpu()
    assert error.norm() <= relative * expected.double().norm()
    if expected.numel() > 1:
        assert error.abs().max() <= 10 * relative * expected.double().abs().max()


def reference(pred: Tensor, target: Tensor, inner: Rectangle) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In fp64, of the very images that the operator gets."""
    with use_reference():
        return backward(pred.double(), target if target.dtype == torch.uint8 else target.double(), inner)


@pytest.mark.parametrize("bytes_", [True, False], ids=["bytes", "floats"])
@pytest.mark.parametrize(
    "height, width, inner",
    [
        (60, 71, (3, 0, 70, 60)),
        (60, 71, (0, 0, 71, 60)),
        (11, 11, (0, 0, 11, 11)),
        (11, 12, (0, 0, 12, 11)),
        (200, 23, (5, 7, 6, 199)),
        (37, 300, (8, 9, 290, 10)),
        (16, 20, (5, 0, 6, 16)),
        (131, 129, (5, 5, 124, 126)),
    ],
)
def test_equals_the_reference(height: int, width: int, inner: Rectangle, bytes_: bool) -> None:
    pred, target = images(height, width, torch.float32)
    target = target if bytes_ else (target / 255).roll(1, 0)
    expected = reference(pred, target, inner)
    actual = backward(pred.cuda(), target.cuda(), inner)
    twin = backward(pred, target, inner)
    for got, cpu, wanted, relative in zip(actual, twin, expected, (1e-6, 1e-5, 1e-4, 1e-4), strict=True):
        assert got.is_cuda and got.shape == wanted.shape and got.dtype == torch.float32
        assert_near(got, wanted, relative)
        assert_near(got, cpu, 2 * relative)
    assert expected[3].count_nonzero() > 0
    # Without any gradient of the reference (no window overlaps), ours is zero, too.
    assert bool((actual[3].cpu()[expected[3] == 0] == 0).all())


def test_a_full_hd_image() -> None:
    pred, target = (x.cuda() for x in images(1080, 1920, torch.float32))
    results = backward(pred, target, whole(pred))
    expected = reference(pred, target, whole(pred))
    for got, wanted, relative in zip(results[:3], expected[:3], (1e-6, 1e-5, 1e-4), strict=True):
        assert_near(got, wanted, relative)
    # Among millions of pixels a few differ from their byte / 255 by less than float32 rounds that quotient: the sign of
    # the difference, 0.8 of the gradient, is then anybody's.
    distance = (pred.double() - target.double() / 255).abs()
    unclear = (distance > 0) & (distance < 2.0**-24)
    assert int(unclear.sum()) <= 20
    assert bool(((results[3] - expected[3]).abs()[unclear] < 1.6 + 1e-3).all())
    assert_near(torch.where(unclear, expected[3], results[3].double()), expected[3], 1e-4)


@pytest.mark.parametrize("cuts_x, cuts_y", [((0, 1, 17, 18, 140), (0, 3, 89, 131)), ((0, 64, 140), (0, 70, 131))])
def test_patches_with_halo_add_up_to_the_image(cuts_x: tuple[int, ...], cuts_y: tuple[int, ...]) -> None:
    pred, target = (x.cuda() for x in images(131, 140, torch.float32))
    sums, total, wanted, expected = in_patches(pred, target, cuts_x, cuts_y)
    torch.testing.assert_close(sums, wanted, rtol=1e-5, atol=0)
    assert_near(total, expected, 1e-4)
    assert expected.count_nonzero() > 0.9 * expected.numel()


def test_bytes_are_255ths() -> None:
    pred, target = (x.cuda() for x in images(70, 50, torch.float32))
    every = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(42)[: 70 * 50 * 3].view(70, 50, 3)
    for given in (target, every):
        # Divided on the CPU: PyTorch multiplies by the reciprocal on CUDA.
        floats = (given.cpu().float() / 255).cuda()
        results = [backward(pred, image, whole(pred)) for image in (given, floats)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_runs_repeat_bit_for_bit() -> None:
    pred, target = (x.cuda() for x in images(400, 600, torch.float32))
    first = backward(pred, target, whole(pred))
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, backward(pred, target, whole(pred)), strict=True))


def test_a_perfect_image() -> None:
    _, target = images(20, 22, torch.float32)
    l1_sum, ssim_sum, _, gradient = backward((target.float() / 255).cuda(), target.cuda(), whole(target))
    assert l1_sum == 0 and ssim_sum.item() == pytest.approx(3 * 10 * 12, rel=1e-5)
    assert gradient.abs().max() < 1e-3  # the sign of zero is zero, and SSIM is at its maximum


def test_a_patch_without_windows_has_l1_alone() -> None:
    pred, target = (x.cuda() for x in images(8, 30, torch.float32))
    inner = (0, 0, 30, 3)  # of an image whose upper border this is: the halo is below
    l1_sum, ssim_sum, dssim, gradient = backward(pred, target, inner)
    difference = pred[:3].cpu() - target[:3].cpu().float() / 255
    assert l1_sum.item() == pytest.approx(difference.abs().sum().item(), rel=1e-6)
    assert ssim_sum == 0 and not dssim.any()
    assert torch.equal(gradient[:3].cpu(), 0.8 * difference.sign()) and not gradient[3:].any()


def test_an_empty_patch() -> None:
    empty = torch.zeros(0, 5, 3, device="cuda")
    assert [x.item() for x in l1_ssim(empty, empty, (0, 0, 5, 0))[:2]] == [0, 0]


def test_a_cuda_graph_holds_forward_and_backward() -> None:
    pred, target = (x.cuda() for x in images(64, 80, torch.float32))
    leaf = pred.clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        l1_sum, ssim_sum, _ = l1_ssim(leaf, target, (2, 3, 80, 60))
        loss = 0.8 * l1_sum - 0.3 * ssim_sum
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    check_replays(step, leaf.data.add_, (0.0, 0.1))


def test_float64_is_named() -> None:
    pred, target = (x.cuda() for x in images(20, 22, torch.float64))
    with pytest.raises(TypeError, match="float32"):
        l1_ssim(pred, target, whole(pred))
