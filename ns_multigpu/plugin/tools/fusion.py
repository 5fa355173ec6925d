"""Surfaces from depth images: fusion into a truncated signed distance field, and a mesh of where that is zero.

Curless and Levoy 1996, by open3d, with the defaults that 2D Gaussian Splatting's published script has for scenes with a
bound (Huang et al. 2024, `render.py`). open3d takes seconds to import: nobody does before a mesh is wanted.
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
"""Parts of a mesh with fewer are noise, and not kept; as published."""
_BLOCK = 16
"""Voxels along a side of a block."""
_BLOCKS_AT_FIRST = 2000
"""Room for 160 MB of them; more is made as they come."""
_STRIDE = 4
"""open3d's: of each so many rows and columns, one pixel is looked at to find blocks."""
_SEEN_ONCE = 0.5
"""Views that see a voxel, more than which make it known."""
_PARALLEL = 1e-4
"""Mean squared sine of the angles between the views' axes below which they have no point in common."""


def load_open3d() -> ModuleType:
    """open3d.

    Raises:
        InputError: it is not installed, or it cannot be loaded.
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
    """The point that views look at, and how far the nearest of them is from it.

    It is the point nearest to all axes: least squares.

    Args:
        camera_to_worlds: [N, 3, 4] poses, OpenGL axes.

    Returns:
        [3] the point, and the distance in world units.

    Raises:
        InputError: there is no such point: the views look the same way, or away from each other.
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
    """A field that depth images are added to, on the host.

    open3d's `VoxelBlockGrid`: blocks of voxels, where there is a surface. (The published script uses
    `ScalableTSDFVolume`, which stays empty in open3d 0.20.)

    Args:
        voxel: side of a voxel. truncation: distance from a surface up to which it is known. max_depth: z-depths beyond
            it are left out. World units.
    """

    def __init__(self, voxel: float, truncation: float, max_depth: float) -> None:
        self._open3d: Any = load_open3d()
        self._voxel, self._max_depth, self._reach = voxel, max_depth, truncation / voxel
        core, self._empty = self._open3d.core, True
        names, widths = ("tsdf", "weight", "color"), ((1), (1), (3))
        self._grid = self._open3d.t.geometry.VoxelBlockGrid(
            names, (core.float32,) * 3, widths, voxel, _BLOCK, _BLOCKS_AT_FIRST, core.Device("CPU:0")
        )

    def add(self, color: Tensor, depth: Tensor, view: View) -> None:
        """Adds a view.

        Args:
            color: [h, w, 3] in [0, 1]. depth: [h, w, 1] z-depth, world units; 0 for nothing there. Both on the host.
            view: the camera.
        """
        if not bool(((depth > 0) & (depth <= self._max_depth)).any()):
            return  # open3d would call it an error
        self._empty = False
        core, K = self._open3d.core, view.K.double().cpu()
        pose = core.Tensor(view.viewmat.double().cpu().numpy())
        ends = (1.0, self._max_depth, self._reach)
        # Blocks are found by every fourth pixel, and there must be one in each block.
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
        """The surface, with colours and normals; perhaps empty."""
        if self._empty:
            return self._open3d.geometry.TriangleMesh()
        return self._grid.extract_triangle_mesh(weight_threshold=_SEEN_ONCE).to_legacy()


def surface_of(pixels: Pixels, least_alpha: float) -> tuple[Tensor, Tensor]:
    """A picture's colour [h, w, 3], without what shines through, and its depth [h, w, 1], 0 where alpha is less than
    `least_alpha`."""
    assert pixels.depth is not None
    there = (pixels.alpha >= least_alpha) & (pixels.depth > 0)
    return pixels.color / pixels.alpha.clamp(min=1e-3), torch.where(there, pixels.depth, torch.zeros_like(pixels.depth))


def largest_parts(mesh: "o3d.geometry.TriangleMesh", parts: int) -> tuple[int, int]:
    """Leaves the parts of a mesh with the most triangles, of those that have `LEAST_TRIANGLES`.

    Args:
        mesh: changed in place. parts: how many.

    Returns:
        how many parts it had, and how many it has. A part is of triangles that share edges.
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
    """Writes a mesh to a file that is there when it is whole.

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
            f"{output} could not be written: {error.strerror or error}. Make room, or choose another --output-path."
        ) from error
