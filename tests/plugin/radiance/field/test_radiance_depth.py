"""Depths of rays through cells: the median by what is behind them, also where a ray's segments are two ranks'; and the
loss of the expected one."""

from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.radiance.field.model import depth_loss
from ns_multigpu.plugin.radiance.field.sampling import Group, median_depth
from ns_multigpu.radiance.integrals import TRANSMITTANCE, Samples
from ns_multigpu.radiance.segments import Segments
from tests.lib.radiance_scene import RAYS, model, moved_cameras, rays, truth

# Three rays through cells 0 and 1, which meet at 2: what each sample of length 1 takes of the light that is left.
TAKEN = {0: [[0.1, 0.2], [0.0, 0.3], [0.0, 0.0]], 1: [[0.1, 0.0], [0.9, 0.0], [0.0, 0.0]]}
LEFT = [0.72, 0.7, 1.0]  # that extends into cell 1
"""The first ray is seen through for the most part: its weights are 0.1, 0.18, 0.072 and 0. Those of the second are 0,
0.3, 0.63 and 0. Nothing is in the way of the third."""


def found(background: str, alone: int | None = None) -> torch.Tensor:
    """Return [3] of both cells, or of one rank's `alone`."""
    segments = Segments(
        3, torch.arange(3).repeat(2), torch.tensor([0.0, 2.0]).repeat_interleave(3),
        torch.tensor([2.0, 4.0]).repeat_interleave(3), (0, 3, 6), torch.tensor([[0, 3], [1, 4], [2, 5]]),
        torch.tensor([2, 2, 2]),
    )  # fmt: skip
    groups = []
    for cell in (0, 1) if alone is None else (alone,):
        edges = torch.arange(3.0).expand(3, 3) + 2 * cell
        density = -torch.log1p(-torch.tensor(TAKEN[cell]))
        first = 0 if alone is not None else 3 * cell
        groups.append(Group(torch.arange(3) + first, Samples(edges, density, edges, {}), 2))
    before = torch.tensor([1.0, 1.0, 1.0, *LEFT])[:, None]
    whole = {TRANSMITTANCE: torch.tensor([LEFT[0] * 0.9, LEFT[1] * 0.1, LEFT[2]])[:, None]}
    return median_depth(groups, before, whole, segments, 3 * (alone or 0), background)[:, 0]


@pytest.mark.parametrize(("background", "expected"), [("last_sample", [3.5, 2.5, 3.5]), ("mean", [1.5, 2.5, 3.5])])
def test_with_a_mean_colour_behind_it_is_half_of_what_is_seen(background: str, expected: list[float]) -> None:
    torch.testing.assert_close(found(background), torch.tensor(expected))
    by_rank = torch.stack([found(background, cell) for cell in (0, 1)])
    torch.testing.assert_close(by_rank.sum(0), torch.tensor(expected))
    assert bool(((by_rank > 0).sum(0) == 1).all()), "one rank has it"


def test_depth_loss_compares_disparities_along_the_ray() -> None:
    directions = torch.nn.functional.normalize(torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]), dim=1)
    origins = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [5.0, 0.0, 0.0]])
    aside = torch.tensor([[2.0, -1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])  # across the first ray
    outputs = {"origins": origins, "directions": directions, "expected_depth": torch.tensor([[2.0], [0.5], [0.1]])}
    outputs = {name: value.requires_grad_() for name, value in outputs.items()}
    points = (origins + directions * torch.tensor([[4.0], [1.0], [9.0]]) + 0.1 * aside).detach()
    loss = depth_loss(outputs, {"points": points, "scales": torch.tensor([[3.0], [3.0], [0.0]])})
    assert float(loss) == pytest.approx(3 * ((1 / 2 - 1 / 4) + (1 / 0.5 - 1 / 1)) / 2)
    loss.backward()
    assert outputs["origins"].grad is None and outputs["directions"].grad is None
    depth = outputs["expected_depth"].grad
    assert depth is not None and depth[:, 0].tolist() == pytest.approx([-3 / 2 / 4, -3 / 2 * 4, 0.0])
    nothing = depth_loss(outputs, {"points": points, "scales": torch.zeros(3, 1)})
    assert float(nothing) == 0


@pytest.mark.parametrize("fixed", [True, False])
def test_depth_loss_trains_densities_and_poses(fixed: bool) -> None:
    """Of the rays at keypoints, along the corrected ray."""
    ours: Any = model(World.single(), 2, depth_loss=0.5)
    moved_cameras(ours)
    ours.fixed = ours.fixed if fixed else None
    ours.begin_step(3)
    bundle, batch = rays(), truth()
    still = bundle.origins.clone()
    outputs = ours(bundle)
    assert not torch.equal(outputs["origins"], still)
    loss = ours.get_loss_dict(outputs, batch, None)["depth_loss"]
    seen = (torch.arange(RAYS) % 3 == 0)[:, None]
    along = ((batch["points"] - outputs["origins"]) * outputs["directions"]).sum(1, keepdim=True).clamp_min(1e-6)
    expected = 2.5 * (1 / outputs["expected_depth"] - 1 / along).abs()[seen].mean()
    torch.testing.assert_close(loss, 0.5 * expected)
    loss.backward()
    trained = {name for name, p in ours.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert {f"cells.{cell}.field.grid.hash_table" for cell in (0, 1)} <= trained, trained
    assert any(name.startswith("shared.density.") for name in trained)
    assert any(name.startswith("camera_optimizer.") for name in trained)
    assert not any("head" in name for name in trained), "no colour"


def test_no_depth_loss_without_its_weight() -> None:
    ours = model(World.single(), 2)
    ours.begin_step(3)
    assert "depth_loss" not in ours.get_loss_dict(ours(rays()), truth(), None)
