"""Small random scenes for the operators' tests, deterministic by seed."""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

import cuda_ext
from cuda_ext.ops.project.lens import lens_intrinsics, panorama_intrinsics


@dataclass
class Scene:
    """N points and V views: the arguments of `cuda_ext.cull`, `project` and `sh_colors`."""

    means: Tensor
    quats: Tensor
    scales: Tensor
    opacities: Tensor
    sh_dc: Tensor
    sh_rest: Tensor
    viewmats: Tensor
    Ks: Tensor
    sizes: list[int]

    @property
    def camera_centers(self) -> Tensor:
        """Return [V, 3] in world coordinates."""
        R, t = self.viewmats[:, :3, :3], self.viewmats[:, :3, 3:]
        return -(R.mT @ t).squeeze(-1)

    @property
    def whole(self) -> list[int]:
        """Return the rectangles (x0, y0, x1, y1) of the whole views."""
        return [n for w, h in zip(self.sizes[::2], self.sizes[1::2], strict=True) for n in (0, 0, w, h)]

    def to(self, dtype: torch.dtype) -> "Scene":
        """Return the same scene in another float dtype."""
        values = (getattr(self, field.name) for field in fields(self))
        return Scene(*(v.to(dtype) if isinstance(v, Tensor) else v for v in values))

    def on(self, device: str) -> "Scene":
        """Return the same scene on another device."""
        values = (getattr(self, field.name) for field in fields(self))
        return Scene(*(v.to(device) if isinstance(v, Tensor) else v for v in values))

    def all_rows(self) -> tuple[Tensor, Tensor]:
        """Every (view, point) pair, in order: view_ids, point_ids."""
        views, points = len(self.viewmats), len(self.means)
        ids = torch.arange(views * points, dtype=torch.int32, device=self.means.device)
        return ids // max(points, 1), ids % max(points, 1)

    def cull(self, rects: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return `cuda_ext.cull` on the whole views, or on `rects`."""
        cameras = (self.viewmats, self.Ks, self.sizes)
        return cuda_ext.cull(self.means, self.scales, self.opacities, *cameras, rects or self.whole)

    def project(self, view_ids: Tensor, point_ids: Tensor, **settings: float | bool) -> cuda_ext.Projection:
        """Return `cuda_ext.project` of these rows."""
        points = (self.means, self.quats, self.scales, self.opacities)
        return cuda_ext.project(*points, self.viewmats, self.Ks, self.sizes, view_ids, point_ids, **settings)


def pad(rows: tuple[Tensor, Tensor], views: int, count: int) -> tuple[Tensor, Tensor]:
    """Return `rows` with `count` rows of padding behind them: point -1 in the last view."""
    view_ids, point_ids = rows
    return torch.cat([view_ids, view_ids.new_full((count,), max(views - 1, 0))]), torch.cat(
        [point_ids, point_ids.new_full((count,), -1)]
    )


def rotations(count: int, angle: float, generator: torch.Generator) -> Tensor:
    """Return [count, 3, 3] float64 rotations by up to about `angle` radians about random axes."""
    w = torch.randn(count, 3, generator=generator, dtype=torch.float64) * angle
    zero = torch.zeros(count, dtype=torch.float64)
    x, y, z = w.unbind(-1)
    return torch.linalg.matrix_exp(torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).view(count, 3, 3))


def random_scene(
    points: int = 300, views: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32, rest_bases: int = 15
) -> Scene:
    """Points around depth 5 seen by slightly different views of different sizes, many of them outside of it, some
    behind the camera, some nearly transparent, some needles and some flat."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    means = normal(points, 3) * torch.tensor([2.5, 2.0, 2.5], dtype=torch.float64)
    means[:, 2] += 5
    viewmats = torch.eye(4, dtype=torch.float64).repeat(views, 1, 1)
    viewmats[:, :3, :3] = rotations(views, 0.2, g)
    viewmats[:, :3, 3] = normal(views, 3) * 0.3
    sizes = [n for view in range(views) for n in (96 - 16 * (view % 3), 64 + 8 * (view % 3))]
    Ks = torch.zeros(views, 3, 3, dtype=torch.float64)
    for view, (K, x) in enumerate(zip(Ks, normal(views, 2), strict=True)):
        K[0, 0], K[1, 1], K[2, 2] = 90 + 5 * view, 85 + 5 * view, 1
        K[0, 2], K[1, 2] = sizes[2 * view] / 2 + x[0], sizes[2 * view + 1] / 2 + x[1]
    return Scene(
        means=means,
        quats=normal(points, 4),
        scales=(normal(points, 3) - 2).exp(),
        opacities=torch.sigmoid(2 * normal(points)),
        sh_dc=normal(points, 3) * 2,
        sh_rest=normal(points, rest_bases, 3) * 0.3,
        viewmats=viewmats,
        Ks=Ks,
        sizes=sizes,
    ).to(dtype)


def one_point(dtype: torch.dtype = torch.float64, **changes: list[float]) -> Scene:
    """Return one round point of scale 0.1 at (0, 0, 5), before one 100 x 80 camera at the origin that looks along z;
    any attribute of the scene can be given as a list."""
    values = {
        "means": [[0.0, 0.0, 5.0]],
        "quats": [[1.0, 0.0, 0.0, 0.0]],
        "scales": [[0.1, 0.1, 0.1]],
        "opacities": [0.9],
        "sh_dc": [[0.1, 0.2, 0.3]],
        "sh_rest": [[[0.1, 0.2, -0.1]] * 15],
        "viewmats": torch.eye(4)[None].tolist(),
        "Ks": [[[100.0, 0.0, 50.0], [0.0, 100.0, 40.0], [0.0, 0.0, 1.0]]],
    }
    return Scene(**{k: torch.tensor(v, dtype=dtype) for k, v in (values | changes).items()}, sizes=[100, 80])


OPENCV = (-0.25, 0.08, -0.01, 0.02, 0.01, 0.005, 3e-3, -2e-3)
"""k1 to k6, p1 and p2 of a wide lens."""
OPENCV_FISHEYE = (0.05, -0.01, 2e-3, -4e-4)


def lens_scene(
    points: int = 300, views: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32, rest_bases: int = 15
) -> Scene:
    """`random_scene` through lenses in turn, see `lens_in_turn`; the points surround the cameras."""
    scene = random_scene(points, views, seed, torch.float64, rest_bases)
    scene.means = scene.means * torch.tensor([1.0, 1.0, 1.6], dtype=torch.float64) - torch.tensor([0.0, 0.0, 3.0])
    sizes = zip(scene.sizes[::2], scene.sizes[1::2], strict=True)
    scene.Ks = torch.stack(
        [lens_in_turn(view, K, size) for view, (K, size) in enumerate(zip(scene.Ks, sizes, strict=True))]
    )
    return scene.to(dtype)


def lens_in_turn(view: int, K: Tensor, size: tuple[int, int]) -> Tensor:
    """Return intrinsics [7, 3]: of a perspective lens for the first view, a fisheye of more than 180 degrees for the
    next, a panorama for the third, and so on."""
    K = K.clone()
    if view % 3 == 0:
        return lens_intrinsics(K, size, OPENCV, fisheye=False)
    if view % 3 == 1:
        K[0, 0], K[1, 1] = 22.0, 21.0
        return lens_intrinsics(K, size, OPENCV_FISHEYE, fisheye=True)
    K[0, 0], K[1, 1] = size[0] / (2 * math.pi), size[1] / math.pi
    K[:2, 2] = torch.tensor(size) / 2
    return panorama_intrinsics(K)
