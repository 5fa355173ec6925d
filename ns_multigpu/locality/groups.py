"""Groups of points that are neighbours along the Z-order, with a box each, and the views that a box may show in.

Groups are what is placed (section 4.2.1), and what is culled before any of their points is looked at (appendix D.1).
The paper asks whether a corner of the box lies in the frustum, which loses a box that is larger than what the camera
sees of it. Here a box goes only where one of the frustum's planes has all of it on the wrong side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ns_multigpu.core.assign.curve import MOST_BITS, interleaved

SMALLEST, LARGEST = 1024, 4096
"""Points of a group, by the paper."""
LEAST, MOST = 32, 16384
"""Allowed range of group sizes, for small models and trials."""
CUTOFF = math.sqrt(2 * math.log(255))
"""Standard deviations at which an opaque splat falls to alpha 1/255: a little more than its square of 3."""
BLOCK = 64
"""Groups whose common box is looked at first."""

_GROUPS = 65536
_PAIRS = 1 << 22


def group_size(points: int) -> int:
    """Default points of a group: about 65,536 groups, of 1024 to 4096 points."""
    wanted = max(1, points // _GROUPS)
    return min(LARGEST, max(SMALLEST, 1 << (wanted - 1).bit_length()))


def z_codes(means: Tensor, low: Tensor, side: float) -> Tensor:
    """Return places [N] int64 along the Z-order of positions [N, 3]: 20 bits an axis over a cube, x lowest.

    Args:
        means: the positions; what is not finite counts as the origin, what lies outside as on the cube's border.
        low: [3], the cube's lower corner. side: of the cube, > 0. Ranks that hold parts of a model share both.
    """
    cells = ((_finite(means) - low.double()) / side * (1 << MOST_BITS)).clamp_(0, (1 << MOST_BITS) - 1).long()
    return interleaved(cells)


def z_order(means: Tensor) -> Tensor:
    """Return the permutation [N] int64 that sorts positions [N, 3] into the Z-order of their bounding cube; stable."""
    if len(means) == 0:
        return torch.zeros(0, dtype=torch.int64, device=means.device)
    places = _finite(means)
    low = places.amin(0)
    side = max(float((places.amax(0) - low).amax()), 1e-30)
    return torch.sort(z_codes(means, low, side), stable=True).indices


def cube_around(means: Tensor, left_out: float = 0.005) -> tuple[Tensor, float]:
    """The lower corner [3] float64 and the side of a cube around positions [N, 3], N > 0, but for a few far ones.

    Args:
        left_out: the part of the positions that may lie outside on either side of an axis.
    """
    places = _finite(means)
    far = int(left_out * len(places))
    low = places.kthvalue(far + 1, dim=0).values
    high = places.kthvalue(len(places) - far, dim=0).values
    return low, max(float((high - low).amax()), 1e-30)


def _finite(means: Tensor) -> Tensor:
    return means.detach().double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Groups:
    """C groups of N points, in the Z-order.

    Attributes:
        size: points of a group; the last may have fewer.
        order: [N] int64, the points, group after group.
        lower, upper: [C, 3] corners of the boxes around the means, with the margin; world units.
        extents: [C] maximum extent of a point's splat around its mean, `CUTOFF` of its largest standard deviations,
            with the margin; world units.
    """

    size: int
    order: Tensor
    lower: Tensor
    upper: Tensor
    extents: Tensor

    @staticmethod
    def of(
        means: Tensor, scales: Tensor, size: int | None = None, margin: float = 0.05, order: Tensor | None = None
    ) -> "Groups":
        """Groups of points.

        Args:
            means: [N, 3] world coordinates. scales: [N, 3] standard deviations, world units.
            size: points of a group, `LEAST` to `MOST`; `group_size` unless given.
            margin: by which boxes are larger than they must be, in half diagonals, for points move in training; extents
                grow by the same fraction, twofold. `still_hold` says whether it was enough.
            order: [N] int64, the points along the curve; `z_order` unless given.

        Raises:
            ValueError: shapes do not fit, there are no points, or size or margin is out of range.
        """
        if means.dim() != 2 or means.shape[1] != 3 or scales.shape != means.shape:
            raise ValueError(f"means and scales must be [N, 3], not {list(means.shape)} and {list(scales.shape)}")
        if len(means) == 0:
            raise ValueError("there are no points to group")
        size = group_size(len(means)) if size is None else size
        if not LEAST <= size <= MOST:
            raise ValueError(
                f"groups of {size} points: give {SMALLEST} to {LARGEST}, or {LEAST} to {MOST} for small models"
            )
        if margin < 0:
            raise ValueError(f"a margin of {margin}: give 0 or more")
        none = means.new_zeros(0)
        order = z_order(means) if order is None else order
        return Groups(size, order, none, none, none).refitted(means, scales, margin)

    @staticmethod
    def along(means: Tensor, order: Tensor, size: int) -> "Groups":
        """Groups of any size >= 1 of points [N, 3] without extent, along an order [N] int64; boxes fit tightly."""
        none = means.new_zeros(0)
        return Groups(size, order, none, none, none).refitted(means, torch.zeros_like(means), margin=0.0)

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    @property
    def points(self) -> Tensor:
        """[C] int64, points of each group."""
        counts = torch.full((len(self),), self.size, dtype=torch.int64, device=self.order.device)
        counts[-1] = len(self.order) - (len(self) - 1) * self.size
        return counts

    def refitted(self, means: Tensor, scales: Tensor, margin: float = 0.05) -> "Groups":
        """The same groups with boxes around where their points are now. See `of`."""
        lower, upper, extents = self._bounds(means, scales)
        wider = margin * (upper - lower).norm(dim=1, keepdim=True) / 2
        return replace(self, lower=lower - wider, upper=upper + wider, extents=extents * (1 + 2 * margin))

    def still_hold(self, means: Tensor, scales: Tensor) -> Tensor:
        """Return [C] bool: whether each box and extent still encloses its points."""
        lower, upper, extents = self._bounds(means, scales)
        return (lower >= self.lower).all(1) & (upper <= self.upper).all(1) & (extents <= self.extents)

    def of_points(self) -> Tensor:
        """[N] int64, the group of each point."""
        found = torch.empty_like(self.order)
        found[self.order] = torch.arange(len(self.order), device=self.order.device) // self.size
        return found

    def _bounds(self, means: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spare = len(self) * self.size - len(self.order)
        rows = torch.cat([self.order, self.order[-1:].expand(spare)]).view(len(self), self.size)
        at = means.detach()[rows]
        # What is nowhere is never drawn, and must not take its neighbours with it.
        there, most = at.isfinite().all(2, keepdim=True), torch.finfo(at.dtype).max
        lower, upper = torch.where(there, at, most).amin(1), torch.where(there, at, -most).amax(1)
        nowhere = ~there.any(1)
        extents = CUTOFF * scales.detach().nan_to_num(nan=0.0, posinf=0.0).amax(1)[rows].amax(1)
        return lower.masked_fill(nowhere, 0.0), upper.masked_fill(nowhere, 0.0), extents


def cull_groups(
    groups: Groups,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Sequence[int],
    rects: Sequence[int],
    eps2d: float = 0.3,
    near: float = 0.01,
    far: float = 1e10,
) -> tuple[Tensor, Tensor]:
    """Return the groups that may be visible in each view's rectangles: all those of which `cull` would keep a point,
    and some more.

    A splat's half extent times its depth is at most focal length * extent * |(u, v, 1)| + depth * pixels, where (u, v)
    is clamped to the image and 15 % more a side, and pixels are what eps2d and rounding add. So each side of the
    rectangle is a half space of the means, whatever lies before or behind the camera.

    Args:
        groups: their boxes. viewmats: [V, 4, 4]. Ks: [V, 3, 3].
        sizes, rects, eps2d, near, far: as `cuda_ext.ops.project.culling.cull` has them.

    Returns:
        view_ids and group_ids [M] int64, by view, then group.
    """
    device, views = groups.lower.device, len(viewmats)
    normals, offsets, slacks = _planes(viewmats, Ks, sizes, rects, eps2d, near, far, device)
    shown = torch.tensor(
        [rects[4 * v] < rects[4 * v + 2] and rects[4 * v + 1] < rects[4 * v + 3] for v in range(views)]
    )
    boxes = torch.cat([groups.lower, groups.upper, groups.extents[:, None]], dim=1).double()
    count, blocks = len(boxes), -(-len(boxes) // BLOCK)
    padded = torch.cat([boxes, boxes[-1:].expand(blocks * BLOCK - count, 7)]).view(blocks, BLOCK, 7)
    outer = torch.cat([padded[..., :3].amin(1), padded[..., 3:].amax(1)], dim=1)
    found_views: list[Tensor] = []
    found_groups: list[Tensor] = []
    step = max(1, _PAIRS // (blocks * 8))
    for start in range(0, views, step):
        part = torch.arange(start, min(start + step, views), device=device)
        part = part[shown.to(device)[part]]
        pairs = torch.cartesian_prod(part, torch.arange(blocks, device=device)).view(-1, 2)
        view, block = pairs[_may_show(outer, pairs, normals, offsets, slacks)].unbind(1)
        for some in torch.arange(len(view), device=device).split(_PAIRS // BLOCK):
            inner = block[some, None] * BLOCK + torch.arange(BLOCK, device=device)
            pairs = torch.stack([view[some, None].expand_as(inner), inner], dim=2).view(-1, 2)
            pairs = pairs[pairs[:, 1] < count]
            pairs = pairs[_may_show(boxes, pairs, normals, offsets, slacks)]
            found_views.append(pairs[:, 0])
            found_groups.append(pairs[:, 1])
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return torch.cat([none, *found_views]), torch.cat([none, *found_groups])


def _planes(
    viewmats: Tensor, Ks: Tensor, sizes: Sequence[int], rects: Sequence[int], eps2d: float, near: float, far: float,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Half spaces n x + d <= slack * extents: normals [V, 6, 3], offsets [V, 6] and slacks [V, 6], world units."""
    views = len(viewmats)
    K, pose = Ks.to(device).double(), viewmats.to(device).double()
    size = torch.tensor(list(sizes), dtype=torch.float64, device=device).view(views, 2)
    rect = torch.tensor(list(rects), dtype=torch.float64, device=device).view(views, 2, 2)
    focal, centre = torch.stack([K[:, 0, 0], K[:, 1, 1]], 1), K[:, :2, 2]
    pixels = CUTOFF * math.sqrt(eps2d) + 2.0
    furthest = (torch.maximum(centre, size - centre) + 0.15 * size) / focal
    stretch = (1 + furthest.square().sum(1)).sqrt()
    normal = torch.zeros(views, 6, 3, dtype=torch.float64, device=device)
    offset = torch.zeros(views, 6, dtype=torch.float64, device=device)
    slack = torch.zeros(views, 6, dtype=torch.float64, device=device)
    for axis in range(2):
        for end, sign in ((0, -1.0), (1, 1.0)):
            side = 2 * axis + end
            normal[:, side, axis] = sign * focal[:, axis]
            normal[:, side, 2] = sign * (centre[:, axis] - rect[:, end, axis]) - pixels
            # The square of 3 sigma is measured by the longer focal length, whatever the axis.
            longer = torch.maximum(focal[:, axis], focal.amax(1) * (3 / CUTOFF))
            slack[:, side] = longer * stretch * (1 + 1e-5)
    normal[:, 4, 2], offset[:, 4] = -1.0, near
    normal[:, 5, 2], offset[:, 5] = 1.0, -far
    offset = offset + torch.einsum("vsk,vk->vs", normal, pose[:, :3, 3])
    return torch.einsum("vsk,vkx->vsx", normal, pose[:, :3, :3]), offset, slack


def _may_show(boxes: Tensor, pairs: Tensor, normals: Tensor, offsets: Tensor, slacks: Tensor) -> Tensor:
    """[P] bool for pairs [P, 2] of a view and a box of [C, 7]: whether no plane has all of the box outside."""
    keep = torch.ones(len(pairs), dtype=torch.bool, device=boxes.device)
    centre, half = (boxes[:, :3] + boxes[:, 3:6]) / 2, (boxes[:, 3:6] - boxes[:, :3]) / 2
    view, box = pairs.unbind(1)
    for side in range(6):
        normal = normals[:, side]
        least = (normal[view] * centre[box]).sum(1) - (normal.abs()[view] * half[box]).sum(1) + offsets[view, side]
        # Rounding, of float32 depths too: coordinates of far places have an error of their own.
        error = 2e-6 * ((normal.abs()[view] * (centre.abs() + half)[box]).sum(1) + offsets[view, side].abs())
        keep &= least <= slacks[view, side] * boxes[box, 6] + error
    return keep
