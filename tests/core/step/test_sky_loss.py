"""The loss of the sky: its formula, and its gradient behind an opaque splat."""

import math

import torch

from ns_multigpu.core.step.loss import sky_loss
from ns_multigpu.core.types import Patch, View

WIDTH, HEIGHT = 23, 17
VIEW = View(torch.eye(4), torch.eye(3), WIDTH, HEIGHT)


def images() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    alpha, sky = torch.rand(2, HEIGHT, WIDTH, 1, generator=g, dtype=torch.float64)
    alpha[:3] = 1.0
    return alpha, (sky - 0.4).clamp(0, 0.5) * 2


def test_the_formula_and_its_gradient() -> None:
    alpha, sky = images()
    expected = 0.0
    for a, s in zip(alpha.flatten().tolist(), sky.flatten().tolist(), strict=True):
        expected -= s * math.log((1 - a + 1e-4) / (1 + 1e-4)) / (WIDTH * HEIGHT)
    whole = Patch.whole(0, VIEW)
    assert abs(float(sky_loss(alpha, sky, whole, VIEW)) - expected) < 1e-12 < expected
    assert float(sky_loss(torch.zeros_like(alpha), sky, whole, VIEW)) == 0, "of an empty sky"
    assert float(sky_loss(alpha, torch.zeros_like(sky), whole, VIEW)) == 0, "of no sky"
    inner = (0.9 * alpha).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: sky_loss(a, sky, whole, VIEW), inner, fast_mode=True)


def test_a_splat_behind_an_opaque_one_has_a_gradient() -> None:
    opacities = torch.tensor([0.999, 0.6], dtype=torch.float64, requires_grad=True)
    alpha = (1 - (1 - opacities).prod()).expand(HEIGHT, WIDTH, 1)
    loss = sky_loss(alpha, torch.ones(HEIGHT, WIDTH, 1, dtype=torch.bool), Patch.whole(0, VIEW), VIEW)
    front, behind = torch.autograd.grad(loss, opacities)[0].tolist()
    assert front > 500 and behind > 1, "the squared alpha would give it 0.002"
