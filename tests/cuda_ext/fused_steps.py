"""Scenes, gradients and comparisons of the fused operators' tests."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import adam_scalars
from cuda_ext.ops.optim.fused import SplatRows, splat_forward, splat_update
from tests.cuda_ext.scenes import lens_scene, random_scene

RATES = (1.6e-2, 1e-2, 5e-2, 5e-2, 2.5e-2, 1e-2)


@dataclass
class Model:
    """Six parameters with moments, as `splat_update` takes them, and the cameras."""

    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    scalars: Tensor
    viewmats: Tensor
    Ks: Tensor
    sizes: list[int]

    def to(self, device: str, dtype: torch.dtype = torch.float32) -> "Model":
        """Return a copy."""
        lists = [[t.to(device, dtype, copy=True) for t in ts] for ts in (self.params, self.exp_avgs, self.exp_avg_sqs)]
        return Model(*lists, *(t.to(device, dtype) for t in (self.scalars, self.viewmats, self.Ks)), self.sizes)

    def forward(self, capacity: int, degree: int | None = 3, **settings: Any) -> SplatRows:
        return splat_forward(*self.params, self.viewmats, self.Ks, self.sizes, degree, capacity, **settings)

    def update(self, rows: SplatRows, records: Tensor, degree: int | None = 3, **settings: Any) -> None:
        moments = (self.exp_avgs, self.exp_avg_sqs, self.scalars)
        splat_update(self.params, *moments, self.viewmats, self.Ks, self.sizes, rows, records, degree, **settings)


def make_model(
    points: int = 300, views: int = 2, seed: int = 0, rest: int = 15, spread: float = 1.0, lenses: bool = False
) -> Model:
    """Return a random scene in float64 whose Adam has been at work; `spread` > 1 puts more points outside of images."""
    scene = (lens_scene if lenses else random_scene)(points, views, seed, torch.float64, rest)
    means = scene.means * torch.tensor([spread, spread, 1.0], dtype=torch.float64)
    params = [means, scene.quats, scene.scales.log(), scene.opacities.logit(), scene.sh_dc, scene.sh_rest]
    g = torch.Generator().manual_seed(seed + 1)
    exp_avgs = [0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64) for p in params]
    exp_avg_sqs = [0.1 * torch.rand(p.shape, generator=g, dtype=torch.float64) for p in params]
    scalars = [adam_scalars(rate, (0.9, 0.999), 1e-15, 7) for rate in RATES]
    table = torch.tensor(scalars, dtype=torch.float64)
    return Model(params, exp_avgs, exp_avg_sqs, table, scene.viewmats, scene.Ks, scene.sizes)


def make_records(rows: SplatRows, depth: bool = False) -> Tensor:
    """Random gradients [M, 16] of a size that moves parameters; of dead and padding rows too, where they must not
    count. What is not to be looked at is NaN."""
    g, nan = torch.Generator().manual_seed(0), float("nan")
    by_depth = 0.3 if depth else nan
    sizes = torch.tensor([0.01] * 2 + [0.1] * 3 + [0.3] * 4 + [by_depth] + [0.02] * 2 + [nan] * 4, dtype=torch.float64)
    records = sizes * torch.randn(len(rows.point_ids), 16, generator=g, dtype=torch.float64)
    records[:, 10:12].abs_()
    return records.to(rows.means2d)


def to(rows: Any, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a named tuple of tensors on another device, its floats as `dtype`."""
    moved = (t.to(device, dtype) if t.dtype.is_floating_point else t.to(device) for t in rows)
    return type(rows)(*moved)
