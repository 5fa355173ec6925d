"""Surfaces from depth images: fusion into a truncated signed distance field, and extraction of its zero level as a
mesh.

The method is Curless and Levoy 1996, by open3d. Defaults are those of 2D Gaussian Splatting's published script for
bounded scenes (Huang et al. 2024, `render.py`). open3d takes seconds to import, so it is imported only when a mesh is
made.
"""

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import track
from torch import Tensor

from ns_multigpu.core.types import Pixels, View
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.tools.mesh import Mesh, joined

BLOCKS_PER_GRID = 65536
"""Largest number of blocks of a grid, 5 GB: open3d indexes colours in 32 bits, so 174,763 would overflow."""
BLOCKS_AT_ONCE = 8192
"""Largest number of blocks that are extracted at once, 1.2 GB. open3d counts bytes in 32 bits, so 32,768 crash."""
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
        self._grids = [self._new_grid(_BLOCKS_AT_FIRST)]

    def _new_grid(self, blocks: int) -> Any:
        core, names, widths = self._open3d.core, ("tsdf", "weight", "color"), ((1), (1), (3))
        return self._open3d.t.geometry.VoxelBlockGrid(
            names, (core.float32,) * 3, widths, self._voxel, _BLOCK, blocks, core.Device("CPU:0")
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
        core, K = self._open3d.core, view.K.double().cpu()
        pose = core.Tensor(view.viewmat.double().cpu().numpy())
        ends = (1.0, self._max_depth, self._truncation)
        # Blocks are found from every fourth pixel, so each block must contain one: upsample the depth.
        finer = max(1, math.ceil(_STRIDE * self._max_depth / (float(K[[0, 1], [0, 1]].min()) * _BLOCK * self._voxel)))
        dense = depth.repeat_interleave(finer, 0).repeat_interleave(finer, 1)
        scaled = K * torch.tensor([finer, finer, 1.0], dtype=K.dtype)[:, None]
        rest = self._grids[0].compute_unique_block_coordinates(
            self._image(dense), core.Tensor(scaled.numpy()), pose, *ends
        )
        camera = core.Tensor(K.numpy())

        def integrate(grid: Any, blocks: Any) -> None:
            if len(blocks):
                grid.integrate(blocks, self._image(depth), self._image(color.clamp(0, 1)), camera, camera, pose, *ends)

        for grid in self._grids:
            _, known = grid.hashmap().find(rest)
            integrate(grid, rest[known])
            rest = rest[known.logical_not()]
        while len(rest):
            if not (capacity := BLOCKS_PER_GRID - self._grids[-1].hashmap().size()):
                self._grids.append(self._new_grid(_BLOCKS_AT_FIRST))
                continue
            integrate(self._grids[-1], rest[:capacity])
            rest = rest[capacity:]

    def _image(self, values: Tensor) -> Any:
        return self._open3d.t.geometry.Image(np.ascontiguousarray(values.float().numpy()))

    def mesh(self) -> Mesh:
        """Return the surface as a mesh; it may be empty. At most `BLOCKS_AT_ONCE` blocks are extracted at once.

        Voxels count as observed only in a piece's core and on its upper planes. So each cube of eight voxels belongs to
        one piece, and the pieces together are the whole field's mesh.
        """
        fields = [_blocks_of(grid) for grid in self._grids]
        keys = np.concatenate([field[0] for field in fields])
        if not len(keys):
            return Mesh.empty()
        core, meshes = self._open3d.core, list[Mesh]()
        cores = list(_cores(keys, keys.min(0), keys.max(0) + 1))
        for low, high in track(cores, "Extracting the mesh", console=CONSOLE, transient=True):
            piece = self._new_grid(int(_within(keys, low - 1, high + 1).sum()))
            for of, places, (tsdf, weight, color) in fields:
                near = _within(of, low - 1, high + 1)
                some, at = of[near], places[near]
                if len(some):
                    values = (tsdf[at], weight[at] * _observed(some, low, high), color[at])
                    piece.hashmap().insert(core.Tensor(some), [core.Tensor(value) for value in values])
            meshes.append(_extract(piece))
        return joined(meshes, _BLOCK * self._voxel)


def _blocks_of(grid: Any) -> tuple[Any, Any, Any]:
    """Return a grid's block coordinates [N, 3], their places [N], and views of the values [places, 16, 16, 16, ...]."""
    blocks = grid.hashmap()
    places = blocks.active_buf_indices().numpy().astype(np.int64)
    return blocks.key_tensor().numpy()[places], places, tuple(values.numpy() for values in blocks.value_tensors())


def _observed(keys: Any, low: Any, high: Any) -> Any:
    """Return for each voxel of the blocks `keys` [N, 3] if it lies in a box or on its upper planes: [N, z, y, x, 1]."""
    known = np.ones((len(keys), 1, 1, 1, 1), bool)
    for axis in range(3):
        voxels = keys[:, axis, None] * _BLOCK + np.arange(_BLOCK)
        shape = [len(keys), 1, 1, 1, 1]
        shape[3 - axis] = _BLOCK
        known = known & ((voxels >= low[axis] * _BLOCK) & (voxels <= high[axis] * _BLOCK)).reshape(shape)
    return known


def _extract(grid: Any) -> Mesh:
    mesh = grid.extract_triangle_mesh(weight_threshold=_SEEN_ONCE)
    if "indices" not in mesh.triangle:
        return Mesh.empty()
    colors = np.rint(mesh.vertex.colors.numpy().clip(0, 1) * 255).astype(np.uint8)
    return Mesh(mesh.vertex.positions.numpy(), mesh.vertex.normals.numpy(), colors, mesh.triangle.indices.numpy())


def _within(keys: Any, low: Any, high: Any) -> Any:
    return ((keys >= low) & (keys < high)).all(1)


def _cores(keys: Any, low: Any, high: Any) -> Iterator[tuple[Any, Any]]:
    """Yield boxes [low, high) of blocks that partition the blocks `keys` [N, 3]. With its neighbours, a box has at most
    `BLOCKS_AT_ONCE` blocks, or is a single block.
    """
    keys = keys[_within(keys, low - 1, high + 1)]
    sides = high - low
    if len(keys) <= BLOCKS_AT_ONCE or sides.max() == 1:
        yield low, high
        return
    axis = int(sides.argmax())
    middle = int(np.clip(np.median(keys[:, axis]), low[axis] + 1, high[axis] - 1))
    upper, lower = high.copy(), low.copy()
    upper[axis] = lower[axis] = middle
    yield from _cores(keys, low, upper)
    yield from _cores(keys, lower, high)


def surface_of(pixels: Pixels, least_alpha: float) -> tuple[Tensor, Tensor]:
    """Return a picture's colour [h, w, 3], divided by alpha, and its depth [h, w, 1], 0 where alpha is below
    `least_alpha`.
    """
    assert pixels.depth is not None
    there = (pixels.alpha >= least_alpha) & (pixels.depth > 0)
    return pixels.color / pixels.alpha.clamp(min=1e-3), torch.where(there, pixels.depth, torch.zeros_like(pixels.depth))
