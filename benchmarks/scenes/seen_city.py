"""Visibility in the views of a procedural city, by groups of points and by patches: input of placement and assignment.

Points lie where pictures show something: each view's depths are traced at a low resolution, and some of these pixels,
of all views alike, become points. So there are more of them near a street camera's road than far from it, as
densification has it. A point's standard deviation is what its pixel covers. What a view sees of a group is counted in
three ways: what lies in the frustum (`pts_culling`, conservative, as in training); of that, what is nearer than a
sixteenth of the city's side (Gaian's far plane for streets, appendix E.1); and what nothing hides, by the depths.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from scipy import sparse
from torch import Tensor

from cuda_ext.ops.project.culling import cull
from ns_multigpu.city.capture import CityCapture, Kind
from ns_multigpu.city.city import City
from ns_multigpu.core.types import SSIM_HALO
from ns_multigpu.locality.groups import Groups, z_codes

VISIBILITY_RULES = ("frustum", "near", "visible")
FACTORS = (1, 2, 4)
"""Patches along each side of a picture that are counted."""
_TRACED = 64
"""Columns of pixels that are traced of a view."""
_FARTHEST = 3000.0
_HIDDEN = 1.05
"""Behind what is seen by more than this and a metre: hidden."""


@dataclass(frozen=True)
class SeenCity:
    """Counts.

    Attributes:
        seen: by (one of `VISIBILITY_RULES`, factor): [V * factor^2, C] csr, points of each group, patches row by row,
            view after view.
        points: [C] int64, points of each group.
        views: how many. half: half the city's side, metres.
    """

    seen: dict[tuple[str, int], Any]
    points: np.ndarray
    views: int
    half: float


def seen_city(
    kind: Kind,
    blocks: int,
    views: int,
    points: int,
    size: int,
    altitude: float | None = None,
    cache: Path | None = None,
) -> SeenCity:
    """Create a city and count which points its views show.

    Args:
        kind: "aerial" or "street". blocks: along a side of the city. views: how many.
        points: how many. size: of a group. altitude: of the cameras, metres; None for the capture's own.
        cache: a folder where counts are kept, or None.
    """
    name = f"{kind}-{blocks}-{views}-{points}-{size}-{altitude}"
    if cache is not None and (cache / name / "rest.npz").exists():
        return _read(cache / name)
    width, height = (1920, 1080) if kind == "aerial" else (1000, 562)
    city = City(blocks, 7)
    capture = CityCapture(city, kind, views, width, height, 1, altitude=altitude)
    depths = torch.stack([capture.depth(v, scale=_TRACED / width) for v in track(range(views), "tracing")])
    means, scales = points_seen(capture, depths, points)
    low = means.amin(0)
    codes = z_codes(means, low, float((means.amax(0) - low).amax()))
    groups = Groups.along(means, torch.sort(codes, stable=True).indices, size)
    rows: dict[tuple[str, int], list[Any]] = {(way, f): [] for way in VISIBILITY_RULES for f in FACTORS}
    means, scales = means[groups.order].contiguous(), scales[groups.order].contiguous()
    opacities = torch.full((len(means),), 0.7)
    for view in track(range(views), "counting"):
        _count(capture, view, depths[view], groups, means, scales, opacities, rows)
    seen = {key: sparse.vstack(parts).tocsr() for key, parts in rows.items()}
    found = SeenCity(seen, groups.points.numpy(), views, city.half)
    if cache is not None:
        _write(found, cache / name)
    return found


def points_seen(capture: CityCapture, depths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return `count` positions [N, 3] that pixels of depths [V, h, w] show, and standard deviations [N, 3], in
    metres."""
    height, width = depths.shape[1:]
    generator = torch.Generator().manual_seed(11)
    good = ((depths > 0) & (depths < _FARTHEST)).view(-1).nonzero().squeeze(1)
    times = -(-count // len(good))
    picked = torch.cat([good[torch.randperm(len(good), generator=generator)] for _ in range(times)])[:count]
    view, pixel = picked // (height * width), picked % (height * width)
    # Anywhere in the pixel, on the plane through its middle that faces the camera.
    at = torch.stack([pixel % width, pixel // width], 1) + torch.rand(count, 2, generator=generator)
    depth, focal = depths.view(-1)[picked], capture.fx * width / capture.width
    local = torch.stack([at[:, 0] - width / 2, height / 2 - at[:, 1], torch.full((count,), -focal)], 1) / focal
    pose = capture.c2w[view]
    means = torch.einsum("nij,nj->ni", pose[:, :, :3], local * depth[:, None]) + pose[:, :, 3]
    sigma = depth / focal * math.sqrt(len(good) / count) / 8  # a picture's own pixels are that much finer
    return means, sigma.clamp(0.01, 1.0)[:, None].expand(-1, 3).contiguous()


def _count(
    capture: CityCapture, view: int, depths: Tensor, groups: Groups, means: Tensor, scales: Tensor, opacities: Tensor,
    rows: dict[tuple[str, int], list[Any]],
) -> None:  # fmt: skip
    """Add the view's rows. Means, scales and opacities are in the groups' order."""
    pose = viewmat_of(capture, view)
    K = torch.tensor([[[capture.fx, 0.0, capture.cx], [0.0, capture.fy, capture.cy], [0.0, 0.0, 1.0]]])
    size = [capture.width, capture.height]
    point = cull(means, scales, opacities, pose, K, size, [0, 0, *size])[1].long()
    seen = means[point] @ pose[0, :3, :3].T + pose[0, :3, 3]
    depth = seen[:, 2]
    at = seen[:, :2] / depth[:, None] * capture.fx + torch.tensor([capture.cx, capture.cy])
    radius = 3 * (scales[point, 0] * capture.fx / depth) + 1 + SSIM_HALO
    height, width = depths.shape
    # Shown, if nearer than the furthest thing that is seen around it.
    shown = torch.where(depths > 0, depths, torch.full_like(depths, 1e9))[None]
    furthest = torch.nn.functional.max_pool2d(shown, 3, 1, 1)[0]
    column = (at[:, 0] * width / capture.width).long().clamp(0, width - 1)
    row = (at[:, 1] * height / capture.height).long().clamp(0, height - 1)
    visible = depth <= furthest[row, column] * _HIDDEN + 1.0
    masks = {"frustum": slice(None), "near": depth <= capture.city.half / 8, "visible": visible}
    group, bounds = point // groups.size, torch.tensor(size)
    for factor in FACTORS:
        low = ((at - radius[:, None]) / bounds * factor).floor().long().clamp(0, factor - 1)
        high = ((at + radius[:, None]) / bounds * factor).floor().long().clamp(0, factor - 1)
        for way in VISIBILITY_RULES:
            rows[way, factor].append(
                _by_patch(group[masks[way]], low[masks[way]], high[masks[way]], factor, len(groups))
            )


def _by_patch(group: Tensor, low: Tensor, high: Tensor, factor: int, groups: int) -> Any:
    """Return [factor^2, groups] csr, each group's points in each patch. A point shows in patches low to high [n, 2]."""
    cells = [low[:, 1] * factor + low[:, 0]]
    owners = [group]
    wide = (low != high).any(1).nonzero().squeeze(1)
    for y in range(factor):
        for x in range(factor):
            place = torch.tensor([x, y])
            reached = (low[wide] <= place).all(1) & (high[wide] >= place).all(1) & (low[wide] != place).any(1)
            more = wide[reached]
            cells.append(torch.full_like(more, y * factor + x))
            owners.append(group[more])
    cell, owner = torch.cat(cells).numpy(), torch.cat(owners).numpy()
    ones = np.ones(len(cell), dtype=np.int32)
    return sparse.coo_matrix((ones, (cell, owner)), (factor * factor, groups)).tocsr()


def viewmat_of(capture: CityCapture, view: int) -> Tensor:
    """Return the world-to-camera matrix [1, 4, 4] of one view; `viewmats` returns all."""
    rotation = capture.c2w[view, :, :3] * torch.tensor([1.0, -1.0, -1.0])
    result = torch.eye(4)[None].clone()
    result[0, :3, :3] = rotation.T
    result[0, :3, 3] = -(rotation.T @ capture.c2w[view, :, 3])
    return result


def _write(city: SeenCity, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for (way, factor), matrix in city.seen.items():
        sparse.save_npz(folder / f"{way}-{factor}.npz", matrix)
    np.savez(folder / "rest.npz", points=city.points, views=city.views, half=city.half)


def _read(folder: Path) -> SeenCity:
    rest = np.load(folder / "rest.npz")
    seen = {(w, f): sparse.load_npz(folder / f"{w}-{f}.npz").tocsr() for w in VISIBILITY_RULES for f in FACTORS}
    return SeenCity(seen, rest["points"], int(rest["views"]), float(rest["half"]))
