"""The operators on CUDA against the fp64 reference on CPU: pixels, gradients and the densifier's statistic."""

import pytest
import torch

import cuda_ext
from ns_multigpu.core.step.loss import photometric_loss
from ns_multigpu.core.types import Patch
from ns_multigpu.primitives.gaussians.functions import Gaussians
from tests.strategies.scene import make_image, make_points, make_views

pytestmark = pytest.mark.gpu


def _run(primitive: Gaussians, device: str, dtype: torch.dtype, patches: list[Patch] | None = None) -> dict:
    points = make_points(300, dtype, device, seed=4)
    views = make_views(4, dtype, device)
    poses = [v.viewmat.requires_grad_() for v in views]
    patches = patches or [Patch.whole(i, v) for i, v in enumerate(views)]
    splats = primitive.splat(points, primitive.cull(points, views, range(len(views))), views)
    pixels = primitive.render(splats, patches, views)
    loss = torch.zeros((), device=device, dtype=dtype)
    for p in pixels:
        view = views[p.patch.view]
        rgb = (p.color + (1 - p.alpha) * 0.3).clamp(0, 1)
        left, top, right, bottom = p.patch.rendered(view)
        target = make_image(view)[top:bottom, left:right].to(device)
        loss = loss + photometric_loss(rgb, target, p.patch, view, 0.2)
        if p.depth is not None:
            x0, y0, x1, y1 = p.patch.inner(view)
            loss = loss + 1e-3 * (p.depth * p.alpha)[y0:y1, x0:x1].mean()
    loss.backward()
    statistic = torch.zeros(300, 2, dtype=torch.float64)
    statistic.index_add_(0, splats.hits.point_ids.long().cpu(), splats.probe.grad.double().cpu().abs())
    gradients = {k: v.grad.double().cpu() for k, v in points.params.items() if v.grad is not None}
    gradients["poses"] = torch.stack([p.grad.double().cpu() for p in poses])
    return {
        "loss": loss.item(),
        "pixels": [torch.cat([p.color, p.alpha], -1).detach().double().cpu() for p in pixels],
        "gradients": gradients,
        "statistic": statistic,
    }


def _close(name: str, value: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """Relative error of the whole tensor, and direction: element-wise bounds would hide a missing term."""
    error = float((value - expected).norm() / expected.norm().clamp(min=1e-12))
    cosine = float(torch.nn.functional.cosine_similarity(value.flatten(), expected.flatten(), dim=0))
    assert error < relative and cosine > 1 - relative, f"{name}: relative error {error:.2e}, cosine {cosine:.6f}"
    assert float(expected.abs().max()) > 0


@pytest.mark.parametrize(
    "primitive",
    [
        Gaussians(sh_degree=3, depth=True),
        Gaussians(sh_degree=1, antialiased=True, absgrad=True),
        Gaussians(sh_degree=None, absgrad=True, depth=True),
    ],
    ids=["sh3 depth", "antialiased absgrad", "plain absgrad depth"],
)
def test_against_reference(primitive: Gaussians) -> None:
    with cuda_ext.use_reference():
        expected = _run(primitive, "cpu", torch.float64)
    got = _run(primitive, "cuda", torch.float32)
    assert got["loss"] == pytest.approx(expected["loss"], rel=2e-4)
    for image, wanted in zip(got["pixels"], expected["pixels"], strict=True):
        difference = (image - wanted).abs()
        # A splat at a threshold (alpha 1/255, the image's border, saturation) may fall on the other side.
        assert float((difference > 1e-4).double().mean()) < 0.01, float(difference.max())
        assert float(difference.max()) < 0.02
    for name, gradient in got["gradients"].items():
        _close(name, gradient, expected["gradients"][name], 5e-3)
    _close("statistic", got["statistic"], expected["statistic"], 5e-3)


def test_patches_equal_the_whole() -> None:
    primitive = Gaussians(sh_degree=2, absgrad=True)
    whole = _run(primitive, "cuda", torch.float32)
    patches = []
    for i, view in enumerate(make_views(4, torch.float32)):
        x, y = 17 + i, 13
        for x0, x1 in ((0, x), (x, view.width)):
            for y0, y1 in ((0, y), (y, view.height)):
                patches.append(Patch(i, x0, y0, x1, y1, halo=5))
    cut = _run(primitive, "cuda", torch.float32, patches)
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    for name, gradient in cut["gradients"].items():
        _close(name, gradient, whole["gradients"][name], 1e-4)


def test_nothing_in_view() -> None:
    primitive = Gaussians()
    points = make_points(10, torch.float32, "cuda")
    view = make_views(2, torch.float32, "cuda")[1]
    splats = primitive.splat(points, primitive.cull(points, [view], [0]), [view])
    pixels = primitive.render(splats, [Patch.whole(0, view)], [view])[0]
    assert float(pixels.alpha.detach().sum()) == 0
    pixels.color.sum().backward()
    assert all(float(p.grad.abs().sum()) == 0 for p in points.params.values() if p.grad is not None)
