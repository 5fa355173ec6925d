"""Triangle meshes on the host: joining of pieces, selection of connected parts, and PLY files.

Positions and normals are float32 throughout, as open3d extracts them; only files in the world frame can have float64
positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy  # its parts are loaded when they are first asked for

from ns_multigpu.plugin.export.world_frame import WorldFrame
from ns_multigpu.plugin.faults.errors import SaveFailed, whole_file

LEAST_TRIANGLES = 50
"""Least triangles of a connected part; smaller ones are removed as noise, as published."""
_ROWS_AT_ONCE = 1 << 20
"""Vertices or triangles that are converted for the file at once, about 30 MB."""
_TRIANGLE = np.dtype([("count", "u1"), ("corners", "<i4", 3)])
_HEADER = """ply
format binary_little_endian 1.0
element vertex {vertices}
property {position} x
property {position} y
property {position} z
property float nx
property float ny
property float nz
property uchar red
property uchar green
property uchar blue
element face {triangles}
property list uchar int vertex_indices
end_header
"""


@dataclass(frozen=True)
class Mesh:
    """Triangle mesh.

    Attributes:
        vertices: [V, 3] float32 positions.
        normals: [V, 3] float32.
        colors: [V, 3] uint8.
        triangles: [T, 3] integer indices of vertices.
    """

    vertices: Any
    normals: Any
    colors: Any
    triangles: Any

    @classmethod
    def empty(cls) -> "Mesh":
        """Return the mesh without triangles."""
        floats = np.empty((0, 3), np.float32)
        return cls(floats, floats, np.empty((0, 3), np.uint8), np.empty((0, 3), np.int64))

    def with_triangles(self, kept: Any) -> "Mesh":
        """Return the mesh of the triangles [T] bool `kept`, without the vertices that only others use."""
        triangles = self.triangles[kept]
        used = np.zeros(len(self.vertices), bool)
        used[triangles.reshape(-1)] = True
        corners = (np.cumsum(used) - 1)[triangles]
        return Mesh(self.vertices[used], self.normals[used], self.colors[used], corners)


def joined(meshes: Sequence[Mesh], plane_distance: float) -> Mesh:
    """Return one mesh of several, whose common vertices are merged.

    Args:
        meshes: their common vertices have bitwise equal positions on planes of constant x, y or z.
        plane_distance: distance between those planes; one passes through the origin.
    """
    if len(meshes) == 1:
        return meshes[0]
    starts = np.cumsum([0] + [len(mesh.vertices) for mesh in meshes])
    vertices = np.concatenate([mesh.vertices for mesh in meshes])
    planes = vertices / np.float32(plane_distance)
    shared = np.nonzero((np.abs(planes - np.round(planes)) < 1e-3).any(1))[0]
    rows = np.ascontiguousarray(vertices[shared]).view(np.dtype((np.void, 12)))[:, 0]
    _, first, of = np.unique(rows, return_index=True, return_inverse=True)
    same = np.arange(len(vertices))
    same[shared] = shared[first][of]
    whole = Mesh(
        vertices,
        np.concatenate([mesh.normals for mesh in meshes]),
        np.concatenate([mesh.colors for mesh in meshes]),
        same[np.concatenate([mesh.triangles + start for mesh, start in zip(meshes, starts, strict=False)])],
    )
    return whole.with_triangles(slice(None))


def largest_parts(mesh: Mesh, parts: int) -> tuple[Mesh, int, int]:
    """Return the connected parts of a mesh with the most triangles, of those with at least `LEAST_TRIANGLES`.

    Args:
        mesh: of any number of triangles.
        parts: largest number of parts to keep.

    Returns:
        the mesh, and the number of parts before and after. Triangles of a part share edges.
    """
    number, of = _connected(mesh.triangles, len(mesh.vertices))
    triangles = np.bincount(of, minlength=number)
    kept = np.argsort(-triangles, kind="stable")[:parts]
    kept = kept[triangles[kept] >= LEAST_TRIANGLES]
    a, b, c = mesh.triangles.T
    return mesh.with_triangles(np.isin(of, kept) & (a != b) & (b != c) & (c != a)), number, len(kept)


def _connected(triangles: Any, vertices: int) -> tuple[int, Any]:
    """Return the number of parts, and the part [T] of each triangle."""
    count = len(triangles)
    edges = np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]]).astype(np.int64)
    keys = edges.min(1) * vertices + edges.max(1)
    order = np.argsort(keys)
    equal = keys[order[1:]] == keys[order[:-1]]
    one, other = order[1:][equal] % count, order[:-1][equal] % count
    graph = scipy.sparse.coo_matrix((np.ones(len(one), bool), (one, other)), (count, count))
    number, of = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return int(number), of


def write_mesh(mesh: Mesh, output: Path, frame: WorldFrame | None = None) -> None:
    """Write a mesh to a PLY file atomically, some rows at a time.

    Args:
        mesh: in the model's frame.
        output: the file to write.
        frame: frame of the file; by default the model's. Positions are float64 if float32 cannot hold them.

    Raises:
        SaveFailed: it could not be written.
    """
    name, kind = ("double", "<f8") if frame is not None and frame.is_far else ("float", "<f4")
    vertex = np.dtype([("position", kind, 3), ("normal", "<f4", 3), ("color", "u1", 3)])
    try:
        with whole_file(output) as part, part.open("wb") as file:
            counts = {"vertices": len(mesh.vertices), "triangles": len(mesh.triangles)}
            file.write(_HEADER.format(**counts, position=name).encode())
            for first in range(0, len(mesh.vertices), _ROWS_AT_ONCE):
                some = slice(first, first + _ROWS_AT_ONCE)
                rows = np.empty(len(mesh.vertices[some]), vertex)
                rows["position"], rows["normal"] = mesh.vertices[some], mesh.normals[some]
                if frame is not None:
                    rows["position"] = frame.positions(mesh.vertices[some])
                    rows["normal"] = mesh.normals[some] @ frame.rotation.T
                rows["color"] = mesh.colors[some]
                file.write(rows.data)
            for first in range(0, len(mesh.triangles), _ROWS_AT_ONCE):
                corners = mesh.triangles[first : first + _ROWS_AT_ONCE]
                corners = corners[:, ::-1] if frame is not None and frame.is_mirrored else corners
                rows = np.empty(len(corners), _TRIANGLE)
                rows["count"], rows["corners"] = 3, corners
                file.write(rows.data)
    except OSError as error:
        raise SaveFailed(
            f"{output} could not be written: {error.strerror or error}. Free space, or choose another --output-path."
        ) from error
