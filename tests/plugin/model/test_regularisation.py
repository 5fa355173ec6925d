"""MCMC's regularization in ordinary steps: of the points that a view draws, in shares that add up over ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Hits, Splats
from ns_multigpu.plugin.model.splat_model import SplatModel


def test_only_drawn_points_are_regularised_once_for_each_view() -> None:
    """Point 0 is drawn by both views, 1 by one view, 2 is culled late, 3 is no row."""
    opacities, scales = torch.zeros(4, 1, requires_grad=True), torch.zeros(4, 3, requires_grad=True)
    options = SimpleNamespace(
        use_scale_regularization=False, densifier="mcmc", mcmc_opacity_reg=0.4, mcmc_scale_reg=0.6
    )
    model: Any = SimpleNamespace(
        config=options, step=0, device="cpu", opacities=opacities, scales=scales, num_points=4, total_points=8,
        needle_weight=lambda *_: 0.0,
    )  # fmt: skip
    hits = Hits(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2, 0, 1], dtype=torch.int32))
    splats = Splats(hits, {"radii": torch.tensor([[3, 2], [-3, -3], [1, 1], [2, 2]], dtype=torch.int32)})
    terms = SplatModel.regularisation(model, splats, 2, World.single())
    torch.stack(list(terms.values())).sum().backward()
    views = torch.tensor([2.0, 1.0, 0.0, 0.0])[:, None] / (2 * 8)
    assert opacities.grad is not None and scales.grad is not None
    assert torch.allclose(opacities.grad, 0.4 * views * 0.25)
    assert torch.allclose(scales.grad, (0.6 / 3 * views).expand(4, 3))
    assert terms["mcmc_opacity_reg"].item() == pytest.approx(0.4 * 0.5 * 3 / 16)
