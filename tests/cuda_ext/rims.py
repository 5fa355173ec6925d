"""Points at the rim of what culling keeps, for the tests of boxes: nowhere else is it as hard to keep what it keeps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cuda_ext.ops.project.culling import cull
from cuda_ext.reference import projection as reference
from cuda_ext.reference.projection import BOUND_MARGIN, outward, three_sigma
from tests.cuda_ext.scenes import rotations

Kept = Callable[[Tensor, Tensor], Tensor]
"""From means [N, 3] and scales [N] to bool [V, N]: in which views a point is kept."""


@dataclass
class Cameras:
    """Views as operators take them, and the depth range."""

    viewmats: Tensor
    Ks: Tensor
    sizes: list[int]
    near: float
    far: float

    def seen(self, means: Tensor) -> Tensor:
        """Return [V, N, 3] positions in camera space."""
        return torch.einsum("vij,nj->vni", self.viewmats[:, :3, :3], means) + self.viewmats[:, None, :3, 3]


def make_cameras(unit: float, near: float, far: float, dtype: torch.dtype, seed: int = 0) -> Cameras:
    """Four views from around the origin in all directions, of several sizes and with pixels that are not square.

    Args:
        unit: how many world units the scene is wide. near, far: the depth range, in scenes.
    """
    g, views = torch.Generator().manual_seed(seed), 4
    viewmats = torch.eye(4, dtype=torch.float64).repeat(views, 1, 1)
    viewmats[:, :3, :3] = rotations(views, 2.0, g)
    viewmats[:, :3, 3] = 0.3 * unit * torch.randn(views, 3, generator=g, dtype=torch.float64)
    sizes = [n for view in range(views) for n in (96 + 40 * (view % 3), 64 + 30 * (view % 2))]
    Ks = torch.zeros(views, 3, 3, dtype=torch.float64)
    for view, K in enumerate(Ks):
        K[0, 0], K[1, 1], K[2, 2] = 50 + 20 * view, 110 - 20 * view, 1
        K[0, 2], K[1, 2] = sizes[2 * view] / 2 + 3, sizes[2 * view + 1] * 0.4
    return Cameras(viewmats.to(dtype), Ks.to(dtype), sizes, near * unit, far * unit)


def keeps(cameras: Cameras) -> Kept:
    """By `cull`."""
    whole = [n for w, h in zip(cameras.sizes[::2], cameras.sizes[1::2], strict=True) for n in (0, 0, w, h)]

    def kept(means: Tensor, scales: Tensor) -> Tensor:
        opacities = torch.ones_like(scales)
        view_ids, point_ids = cull(
            means, scales[:, None].repeat(1, 3), opacities, cameras.viewmats, cameras.Ks, cameras.sizes, whole,
            near=cameras.near, far=cameras.far,
        )  # fmt: skip
        found = torch.zeros(len(cameras.viewmats), len(means), dtype=torch.bool)
        found[view_ids.long(), point_ids.long()] = True
        return found

    return kept


def keeps_moving(cameras: Cameras, moved: Tensor, grown: float) -> Kept:
    """As cuda_ext/csrc/common/moving.h keeps opaque points that may be as far as `moved` [] from where they are, and
    whose scales' logarithms may have grown by `grown`."""
    size = cameras.viewmats.new_tensor(cameras.sizes).view(-1, 1, 2)
    lower, upper = reference._clamps(cameras.Ks, size[:, 0])
    focal = torch.stack([cameras.Ks[:, 0, 0], cameras.Ks[:, 1, 1]], 1)[:, None]
    centre, clamps = cameras.Ks[:, None, :2, 2], (lower[:, None], upper[:, None])

    def kept(means: Tensor, scales: Tensor) -> Tensor:
        seen, row = cameras.seen(means), cameras.viewmats[:, 2]
        sizes = torch.einsum("vj,nj->vn", row[:, :3].abs(), means.abs()) + row[:, 3:].abs()
        z, slack = seen[..., 2], moved + 1e-6 * sizes
        least = (z - moved).clamp_min(cameras.near)
        slope = seen[..., :2] / z[..., None]
        moved_slope = moved * (1 + slope.square()).sqrt() / least[..., None]
        clamped = torch.minimum(torch.maximum(slope, clamps[0]), clamps[1]).abs() + moved_slope
        scale = (scales.log() + grown).exp()[:, None] * focal / least[..., None]
        variance = scale.square() * (1 + clamped.square()) + 0.3
        square = three_sigma(variance[..., 0], (scale * clamped).prod(-1), variance[..., 1])
        cutoff2 = reference.cutoff_squared(torch.ones_like(scales))[:, None]
        extent = torch.maximum((cutoff2 * variance).sqrt(), square[..., None]) + focal * moved_slope
        extent, at = outward(extent, BOUND_MARGIN), slope * focal + centre
        touches = ((at + extent > 0) & (at - extent < size)).all(-1)
        in_depth = (z >= cameras.near - slack) & (z <= cameras.far + slack)
        return in_depth & ((z < cameras.near) | touches)

    return kept


def rim(kept: Kept, unit: float, view: int, count: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Means and scales of points that the view keeps, though it does not keep their neighbours in some direction.

    Between a point that is kept and one that is not, found by halving as long as there are numbers in between.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    scales = (unit * torch.exp(2 * normal(count) - 5)).to(dtype)
    inside, outside = ((unit * 2 * normal(count, 3)).to(dtype) for _ in range(2))
    for end, wanted in ((inside, True), (outside, False)):
        for _ in range(30):
            wrong = (kept(end, scales)[view] != wanted).nonzero()[:, 0]
            end[wrong] = (unit * 2 * normal(len(wrong), 3)).to(dtype)
    good = kept(inside, scales)[view] & ~kept(outside, scales)[view]
    for _ in range(30 if dtype == torch.float32 else 60):
        middle = 0.5 * inside + 0.5 * outside
        there = kept(middle, scales)[view][:, None]
        inside, outside = torch.where(there, middle, inside), torch.where(there, outside, middle)
    return inside[good], scales[good]


def box_of_each(means: Tensor, scales: Tensor) -> Tensor:
    """Return [N, 8]: a box around each point alone."""
    return torch.cat([means, means, scales.log()[:, None], torch.zeros_like(means[:, :1])], 1)
