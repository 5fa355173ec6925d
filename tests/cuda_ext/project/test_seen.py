"""Densification counts what gsplat 1.4.0 counts: splats that are not drawn too, if their square touches the view."""

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import adam_scalars
from cuda_ext.ops.optim.lazy_adam import LazyAdam
from tests.cuda_ext.fused_steps import Model, make_records
from tests.lib.ranks import DEVICES

FOCAL, WIDTH, HEIGHT, DEPTH, SCALE = 100.0, 64, 48, 5.0, 0.2
RADIUS = 13  # 3 sqrt(s^2 + 0.3), rounded up, of s = FOCAL / DEPTH * SCALE pixels
RADIUS_OUTSIDE = 14  # 3 sqrt(1.16 s^2 + 0.3): perspective widens it, 40 pixels from the middle


def model_of(columns: Tensor, opacities: Tensor) -> Model:
    """Points at these pixels' columns in the middle line of both of two equal views."""
    count = len(columns)
    means = torch.stack([(columns - WIDTH / 2) * DEPTH / FOCAL, 0 * columns, 0 * columns + DEPTH], dim=-1)
    quats = torch.tensor([1.0, 0, 0, 0]).repeat(count, 1)
    scales = torch.full((count, 3), SCALE).log()
    colors = torch.full((count, 3), 0.5), torch.zeros(count, 15, 3)
    params = [t.double() for t in (means, quats, scales, opacities.logit(), *colors)]
    moments = ([torch.full_like(p, fill) for p in params] for fill in (0.0, 1.0))
    scalars = torch.tensor([adam_scalars(1e-2, (0.9, 0.999), 1e-15, 1)] * 6, dtype=torch.float64)
    K = torch.tensor([[FOCAL, 0, WIDTH / 2], [0, FOCAL, HEIGHT / 2], [0, 0, 1]], dtype=torch.float64)
    eyes = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1)
    return Model(params, *moments, scalars, eyes, K.repeat(2, 1, 1), [WIDTH, HEIGHT] * 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["plain", "lazy"])
def test_squares_that_touch_the_view_are_counted(way: str, device: str) -> None:
    # 64 points outside of the image whose squares overlap it; then alternately such a point and one that is
    # drawn; then points whose squares are outside, too.
    columns = torch.tensor([-8.0] * 64 + [-8.0, 30.0] * 16 + [-15.0] * 40)
    opacities = torch.where(columns > 0, 0.5, 1.02 / 255)
    model = model_of(columns, opacities).to(device)
    lazy = LazyAdam.make(len(columns), model.params[0].device, model.params[0].dtype) if way == "lazy" else None
    missed = {"exp_avgs": model.exp_avgs, "exp_avg_sqs": model.exp_avg_sqs, "lazy": lazy} if lazy else {}
    rows = model.forward(300, 1, **missed)
    outside, drawn = columns == -8.0, columns > 0
    of_row = rows.point_ids[: int(rows.count)].long().cpu()
    radii = rows.radii[: len(of_row)].cpu()
    assert (radii[outside[of_row]] == -RADIUS_OUTSIDE).all() and int(outside[of_row].sum()) == 2 * int(outside.sum())
    assert (radii[drawn[of_row]] > 0).all() and (radii[columns[of_row] == -15.0] == 0).all()

    before = model.params[3].clone()
    statistics = {k: torch.full_like(model.params[0][:, 0], 0.125) for k in ("grad2d", "seen", "radii_max")}
    model.update(rows, make_records(rows), 1, lazy=lazy, **statistics)
    grad2d, seen, radii_max = (statistics[k].cpu() - 0.125 for k in ("grad2d", "seen", "radii_max"))
    torch.testing.assert_close(seen, torch.where(outside | drawn, 2.0, 0.0).to(seen.dtype), rtol=0, atol=0)
    assert bool((grad2d[drawn] > 0).all()) and not bool(grad2d[~drawn].any())
    expected = torch.where(drawn, RADIUS / WIDTH - 0.125, torch.where(outside, RADIUS_OUTSIDE / WIDTH - 0.125, 0.0))
    torch.testing.assert_close(radii_max, expected.to(radii_max.dtype), rtol=0, atol=1e-6)
    assert torch.equal((model.params[3] != before).cpu(), drawn)
