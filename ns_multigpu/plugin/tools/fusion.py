"""Surfaces from depth images: fusion into a truncated signed distance field, and extraction of its zero level as a
mesh.

The method is Curless and Levoy 1996, by open3d. Defaults are those of 2D Gaussian Splatting's published script for
bounded scenes (Huang et al. 2024, `render.py`). open3d takes seconds to import, so it is imported only when a mesh is
made.
"""

import math
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ns_multigpu.core.types import Pixels, View
from ns_multigpu.plugin.faults.errors import InputError, SaveFailed
from ns_multigpu.plugin.tools.film import whole_file

if TYPE_CHECKING:
    import open3d as o3d

LEAST_TRIANGLES = 50
"""Least triangles of a connected part; smaller ones are removed as noise, as published."""
_BLOCK = 16
"""Voxels along a side of a block."""
_BLOCKS_AT_FIRST = 2000
"""Initial number of blocks, 160 MB; more are allocated on demand."""
_STRIDE = 4
"""Stride in rows and columns of the pixels from which open3d allocates blocks."""
_SEEN_ONCE = 0.5
"""Weight threshold: a voxel counts as observed if more views than this see it."""
_PARALLEL = 1e-4
"""Threshold of the mean squared sine of the angles between view axes, below which they have no common point."""


def load_open3d() -> ModuleType:
    """Import open3d.

    Raises:
        InputError: it is not installed, or cannot be loaded.
    """
    try:
        import open3d
    except (ImportError, OSError) as error:
        raise InputError(
            f"A mesh is made by open3d, which cannot be loaded ({error}). Install it: pip install open3d. If a library "
            "is missing: apt install libusb-1.0-0 libgl1."
        ) from error
    return open3d


def looked_at(camera_to_worlds: Tensor) -> tuple[Tensor, float]:
    """Return the point that views look at, and its distance from the nearest view.

    The point is the least-squares intersection of all view axes.

    Args:
        camera_to_worlds: [N, 3, 4] poses, OpenGL axes.

    Returns:
        [3] the point, and the distance in world units.

    Raises:
        InputError: no such point exists: the axes are parallel, or the views look away from it.
    """
    poses = camera_to_worlds.double().cpu()
    origins, axes = poses[:, :, 3], torch.nn.functional.normalize(-poses[:, :, 2], dim=1)
    across = torch.eye(3, dtype=torch.float64) - axes[:, :, None] * axes[:, None, :]
    mean = across.mean(0)
    why = None
    if float(torch.linalg.eigvalsh(mean)[0]) < _PARALLEL:
        why = "they look the same way"
    else:
        point = torch.linalg.solve(mean, (across @ origins[:, :, None]).mean(0))[:, 0]
        ahead = ((point - origins) * axes).sum(1) > 0
        if 2 * int(ahead.sum()) > len(poses):
            return point.to(camera_to_worlds), float((origins - point).norm(dim=1).min())
        why = "most of them look away from where their axes meet"
    raise InputError(
        f"The {len(poses)} views are not around something: {why}. So it is not known how far to look. Give "
        "--max-depth: depths in the model's units up to which there is a surface."
    )


class Fusion:
    """Truncated signed distance field on the host that fuses depth images.

    It uses open3d's `VoxelBlockGrid`: blocks of voxels near surfaces. (`ScalableTSDFVolume` of the published script
    stays empty in open3d 0.20.)

    Args:
        voxel: side of a voxel, world units.
        truncation: distance from a surface up to which the field is defined, world units.
        max_depth: largest z-depth that is fused, world units.
    """

    def __init__(self, voxel: float, truncation: float, max_depth: float) -> None:
        self._open3d: Any = load_open3d()
        self._voxel, self._max_depth, self._truncation = voxel, max_depth, truncation / voxel
        core, self._empty = self._open3d.core, True
        names, widths = ("tsdf", "weight", "color"), ((1), (1), (3))
        self._grid = self._open3d.t.geometry.VoxelBlockGrid(
            names, (core.float32,) * 3, widths, voxel, _BLOCK, _BLOCKS_AT_FIRST, core.Device("CPU:0")
        )

    def add(self, color: Tensor, depth: Tensor, view: View) -> None:
        """Fuse a view.

        Args:
            color: [h, w, 3] in [0, 1], on the host.
            depth: [h, w, 1] z-depth, world units; 0 for no surface. On the host.
            view: the camera.
        """
        if not bool(((depth > 0) & (depth <= self._max_depth)).any()):
            return  # open3d raises on an empty view
        self._empty = False
        core, K = self._open3d.core, view.K.double().cpu()
        pose = core.Tensor(view.viewmat.double().cpu().numpy())
        ends = (1.0, self._max_depth, self._truncation)
        # Blocks are found from every fourth pixel, so each block must contain one: upsample the depth.
        finer = max(1, math.ceil(_STRIDE * self._max_depth / (float(K[[0, 1], [0, 1]].min()) * _BLOCK * self._voxel)))
        dense = depth.repeat_interleave(finer, 0).repeat_interleave(finer, 1)
        scaled = K * torch.tensor([finer, finer, 1.0], dtype=K.dtype)[:, None]
        blocks = self._grid.compute_unique_block_coordinates(
            self._image(dense), core.Tensor(scaled.numpy()), pose, *ends
        )
        camera = core.Tensor(K.numpy())
        self._grid.integrate(blocks, self._image(depth), self._image(color.clamp(0, 1)), camera, camera, pose, *ends)

    def _image(self, values: Tensor) -> Any:
        return self._open3d.t.geometry.Image(np.ascontiguousarray(values.float().numpy()))

    def mesh(self) -> "o3d.geometry.TriangleMesh":
        """Return the surface as a mesh with colours and normals; it may be empty."""
        if self._empty:
            return self._open3d.geometry.TriangleMesh()
        return self._grid.extract_triangle_mesh(weight_threshold=_SEEN_ONCE).to_legacy()


def surface_of(pixels: Pixels, least_alpha: float) -> tuple[Tensor, Tensor]:
    """Return a picture's colour [h, w, 3], divided by alpha, and its depth [h, w, 1], 0 where alpha is below
    `least_alpha`.
    """
    assert pixels.depth is not None
    there = (pixels.alpha >= least_alpha) & (pixels.depth > 0)
    return pixels.color / pixels.alpha.clamp(min=1e-3), torch.where(there, pixels.depth, torch.zeros_like(pixels.depth))


def largest_parts(mesh: "o3d.geometry.TriangleMesh", parts: int) -> tuple[int, int]:
    """Keep the connected parts of a mesh with the most triangles, of those with at least `LEAST_TRIANGLES`.

    Args:
        mesh: changed in place.
        parts: largest number of parts to keep.

    Returns:
        the number of parts before and after. Triangles of a part share edges.
    """
    of, sizes, _ = mesh.cluster_connected_triangles()
    triangles = np.asarray(sizes)
    kept = np.argsort(-triangles, kind="stable")[:parts]
    kept = kept[triangles[kept] >= LEAST_TRIANGLES]
    mesh.remove_triangles_by_mask(~np.isin(np.asarray(of), kept))  # pyright: ignore[reportArgumentType]
    mesh.remove_unreferenced_vertices()
    mesh.remove_degenerate_triangles()
    return len(triangles), len(kept)


def write_mesh(mesh: "o3d.geometry.TriangleMesh", output: Path) -> None:
    """Write a mesh to a file atomically.

    Raises:
        SaveFailed: it could not be written.
    """
    open3d = load_open3d()
    try:
        with whole_file(output) as part:
            if not open3d.io.write_triangle_mesh(str(part), mesh):
                raise OSError("open3d could not write it; is the disk full?")
    except OSError as error:
        raise SaveFailed(
            f"{output} could not be written: {error.strerror or error}. Free space, or choose another --output-path."
        ) from error
