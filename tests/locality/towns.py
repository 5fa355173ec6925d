"""A small town of points, cameras over it, and a graph of groups and views: what the tests here share."""

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from ns_multigpu.locality.graph import SeenGraph

WIDTH, HEIGHT = 96, 64


def town(points: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return means [N, 3], scales [N, 3] and opacities [N] over 100 x 100 metres, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.rand(points, 3, generator=generator) * torch.tensor([100.0, 100.0, 12.0])
    scales = 0.02 + 0.3 * torch.rand(points, 3, generator=generator) ** 4
    scales[:: max(1, points // 20)] *= 12
    return means, scales, 0.02 + 0.98 * torch.rand(points, generator=generator)


def cameras(views: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return viewmats [V, 4, 4] from within and above the town, looking anywhere, and Ks [V, 3, 3]."""
    generator = torch.Generator().manual_seed(seed + 100)
    poses = torch.eye(4).repeat(views, 1, 1)
    rotation = torch.linalg.qr(torch.randn(views, 3, 3, generator=generator)).Q
    rotation[:, 2] *= torch.linalg.det(rotation).sign()[:, None]
    centre = torch.rand(views, 3, generator=generator) * torch.tensor([140.0, 140.0, 40.0]) - 20.0
    poses[:, :3, :3] = rotation
    poses[:, :3, 3] = -torch.einsum("vij,vj->vi", rotation, centre)
    focal = 40.0 + 80.0 * torch.rand(views, generator=generator)
    Ks = torch.zeros(views, 3, 3)
    Ks[:, 0, 0], Ks[:, 1, 1], Ks[:, 2, 2] = focal, focal, 1.0
    Ks[:, 0, 2], Ks[:, 1, 2] = WIDTH / 2 + 5, HEIGHT / 2 - 3
    return poses, Ks


def plain(side: int = 24, views: int = 150, seed: int = 0, across: int = 5) -> SeenGraph:
    """Groups on a square of side x side, in the Z-order, and views that see rectangles `across` groups wide or so."""
    generator = np.random.default_rng(seed)
    x, y = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    code = sum(((x >> b & 1) << 2 * b) | ((y >> b & 1) << 2 * b + 1) for b in range(8))
    place = np.empty(side * side, dtype=np.int64)
    place[np.argsort(np.asarray(code).ravel(), kind="stable")] = np.arange(side * side)
    rows = np.zeros((views, side * side), dtype=np.int64)
    for view in range(views):
        low = generator.integers(0, side - 1, 2)
        high = np.minimum(low + generator.integers(across - 2, across + 3, 2), side)
        cells = place.reshape(side, side)[low[0] : high[0], low[1] : high[1]].ravel()
        rows[view, cells] = generator.integers(1, 1024, len(cells))
    return SeenGraph(sparse.csr_matrix(rows), np.full(side * side, 1024))
