"""`ns-multigpu export-mesh`: mesh of the surfaces that the training views show.

All ranks render the views' depths and colours. Rank 0 fuses them on its host, in view order. So the mesh is independent
of the number of ranks, up to the rounding of pixels.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import track
from torch import Tensor

from ns_multigpu.core.dist.collectives import exchange_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.plugin.export.world_frame import WorldFrame
from ns_multigpu.plugin.faults.errors import InputError, whole_file
from ns_multigpu.plugin.radiance.run.pictures import FieldPictures
from ns_multigpu.plugin.render.panorama import faces
from ns_multigpu.plugin.render.pictures import Pictures
from ns_multigpu.plugin.render.service import RenderRequest
from ns_multigpu.plugin.tools.fusion import Fusion, load_open3d, looked_at, surface_of
from ns_multigpu.plugin.tools.mesh import LEAST_TRIANGLES, largest_parts, write_mesh
from ns_multigpu.plugin.tools.shots import is_panorama
from ns_multigpu.primitives.registry import PRIMITIVES, titled
from ns_multigpu.primitives.registry import RenderOptions as Wanted

DepthKind = Literal["auto", "median", "expected"]
MOST_VOXELS = 16384
"""Largest number of voxels along the depth: finer grids exceed any host's memory."""
_TRUNCATED = 5
"""Default truncation distance in voxels; as published."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the distance field, in world units: see `Fusion`."""

    voxel: float
    truncation: float
    max_depth: float


@dataclass(frozen=True)
class Meshing:
    """Mesh to make.

    Attributes:
        output: the .ply file to write.
        overwrite: replace it if it exists.
        max_depth, voxel, truncation: see `Fusion`; None for defaults from the views.
        resolution: voxels along the depth, if `voxel` is not given.
        parts: number of the largest connected parts to keep.
        depth: surface depth of a pixel: "median", where alpha passes one half, or "expected", the weighted mean. "auto"
            takes the median if the primitive supports it. Radiance fields do.
        least_alpha: least opacity of a surface.
        downscale: render at 1/downscale of the views' size.
        frame: frame of the file; None for the model's.
    """

    output: Path
    max_depth: float | None = None
    voxel: float | None = None
    truncation: float | None = None
    resolution: int = 1024
    parts: int = 50
    depth: DepthKind = "auto"
    least_alpha: float = 0.5
    downscale: float = 1.0
    overwrite: bool = False
    frame: WorldFrame | None = None
    test_mode: Literal["test", "inference"] = "test"

    def check(self) -> None:
        """Check the options, before a model is loaded.

        Raises:
            InputError: an option is invalid.
        """
        if self.output.suffix != ".ply":
            raise InputError(f"--output-path {self.output}: give the name of a .ply file.")
        if self.output.exists() and not self.overwrite:
            raise InputError(f"--output-path {self.output} exists already: give another name, or --overwrite.")
        for name in ("max_depth", "voxel", "truncation", "downscale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{_OPTIONS[name]} {value}: give a number above 0.")
        for name in ("resolution", "parts"):
            if getattr(self, name) < 1:
                raise InputError(f"{_OPTIONS[name]} {getattr(self, name)}: give at least 1.")
        if not 0 < self.least_alpha <= 1:
            raise InputError(f"--min-opacity {self.least_alpha}: give more than 0, and at most 1.")
        load_open3d()
        try:
            with whole_file(self.output.with_name(".probe")) as probe:
                probe.touch()
            self.output.with_name(".probe").unlink()
        except OSError as error:
            raise InputError(
                f"--output-path {self.output} cannot be written: {error.strerror or error}. Choose another place."
            ) from error

    def check_points(self, primitive: str) -> None:
        """Check that the primitive has such a surface.

        Raises:
            InputError: it has none.
        """
        kind = PRIMITIVES[primitive]
        if kind.timed:
            raise InputError(
                f"This is a run of {titled(primitive)}: they move, and its views show different moments. Meshes are of "
                "points that stand still: 2dgs or 3dgs."
            )
        if self.depth == "median" and not self._median(primitive):
            raise InputError(f"--depth median: {titled(primitive)} have expected depth alone. Give expected, or auto.")

    def sizes(self, cameras: Cameras) -> Sizes:
        """Return the requested sizes, or defaults from the views.

        The default depth is twice the distance of the nearest view from the point that all look at.

        Raises:
            InputError: the views do not surround a point, or the sizes are inconsistent.
        """
        depth = self.max_depth
        if depth is None:
            depth = 2 * looked_at(cameras.camera_to_worlds)[1]
        voxel = depth / self.resolution if self.voxel is None else self.voxel
        truncation = _TRUNCATED * voxel if self.truncation is None else self.truncation
        if not 1 <= depth / voxel <= MOST_VOXELS:
            raise InputError(
                f"--voxel-size {voxel:g}: along a depth of {depth:g} that is {depth / voxel:.3g} voxels. Give a size "
                f"between {depth / MOST_VOXELS:.3g} and {depth:.3g}, or --resolution between 1 and {MOST_VOXELS}."
            )
        if truncation < voxel:
            raise InputError(f"--truncation {truncation:g}: give at least the size of a voxel, {voxel:g}.")
        return Sizes(voxel, truncation, depth)

    def run(self, run: Any, checkpoint: Path, pipeline: Any) -> None:
        """Make the mesh. Every rank calls it; see `tools.models.Work`.

        Raises:
            InputError: no surface was found.
        """
        world, primitive = pipeline.world, getattr(pipeline.model.config, "primitive", None)  # none of a radiance field
        if primitive is not None:
            self.check_points(primitive)
        cameras: Cameras = pipeline.datamanager.train_dataset.cameras
        sizes, median = self.sizes(cameras), self._median(primitive)
        views = [cameras[k : k + 1] for k in range(len(cameras))]
        requests = [self._request(one) for view in views for one in (faces(view) if is_panorama(view) else [view])]
        kind = "median" if median else "expected"
        CONSOLE.print(
            f"TSDF fusion of {len(requests)} training views: {kind} depth, limit {sizes.max_depth:.4g}, voxel "
            f"{sizes.voxel:.4g}, truncation {sizes.truncation:.4g} (model units)",
            soft_wrap=True,
        )
        fusion = Fusion(sizes.voxel, sizes.truncation, sizes.max_depth) if world.is_main else None
        for view, color, depth in _drawn(pipeline, requests, median, self.least_alpha):
            if fusion is not None:
                fusion.add(color, depth, view)
        if fusion is None:
            return
        mesh, parts, kept = largest_parts(fusion.mesh(), self.parts)
        if not kept:
            raise InputError(
                f"{checkpoint}: there would be nothing in the mesh. Of {len(requests)} training views no surface was "
                f"found between the depths 0 and {sizes.max_depth:g} (--max-depth) that is at least {self.least_alpha} "
                f"opaque (--min-opacity) and has {LEAST_TRIANGLES} triangles of voxels of {sizes.voxel:g} "
                "(--voxel-size)."
            )
        write_mesh(mesh, self.output, self.frame)
        counts = f"{len(mesh.vertices):,} vertices, {len(mesh.triangles):,} triangles"
        components = f"kept the {kept} largest of {parts:,} connected components"
        CONSOLE.print(f"Wrote {self.output} ({counts}; {components}).", soft_wrap=True)

    def _median(self, primitive: str | None) -> bool:
        if self.depth == "expected" or primitive is None:
            return self.depth != "expected"
        return PRIMITIVES[primitive].make(Wanted(sh_degree=0)).median

    def _request(self, camera: Cameras) -> RenderRequest:
        camera.distortion_params = None  # depths are fused through pinhole cameras
        camera.camera_type = torch.full_like(camera.camera_type, CameraType.PERSPECTIVE.value)
        camera.rescale_output_resolution(1.0 / self.downscale)
        if min(int(camera.width.item()), int(camera.height.item())) < 1:
            raise InputError(f"--downscale-factor {self.downscale}: views would have no pixels.")
        return RenderRequest.of(camera)


_OPTIONS = {
    "max_depth": "--max-depth", "voxel": "--voxel-size", "truncation": "--truncation", "parts": "--parts",
    "downscale": "--downscale-factor", "resolution": "--resolution",
}  # fmt: skip


@torch.no_grad()
def _drawn(
    pipeline: Any, requests: list[RenderRequest], median: bool, least_alpha: float
) -> Iterator[tuple[View, Tensor, Tensor]]:
    """Yield each view with its colour and depth (`surface_of`) on rank 0's host, in order; nothing on other ranks.
    Every rank iterates to the end.
    """
    world, together = pipeline.world, pipeline.renders.shared
    pictures: Pictures | FieldPictures = pipeline.renders.pictures
    if not together:  # each rank has the whole model and renders its own views
        pictures = pictures.alone()
    views = [pictures.view_of(request) for request in requests]
    views = [replace(view, viewmat=view.viewmat.cpu(), K=view.K.cpu()) for view in views]
    rounds: Any = range(0, len(requests), 1 if together else world.size)
    if world.is_main:
        rounds = track(rounds, "Fusing views", console=CONSOLE, transient=True)
    for first in rounds:
        some = requests[first : first + (1 if together else world.size)]
        mine = some[0] if together else some[world.rank] if world.rank < len(some) else None
        pixels = None if mine is None else pictures.surface(mine, (0,), median=median)
        own = None if pixels is None else torch.cat(surface_of(pixels, least_alpha), 2)
        shown = views[first : first + len(some)]
        frames = [own] if together else _at_rank_0(own, shown, world)
        for view, frame in zip(shown, frames, strict=True):
            if frame is not None:
                color, depth = frame.cpu().split([3, 1], dim=2)
                yield view, color, depth


def _at_rank_0(own: Tensor | None, views: list[View], world: World) -> list[Tensor | None]:
    """Return on rank 0 the picture [h, w, 4] that each rank has rendered; None on other ranks."""
    sizes = [view.width * view.height for view in views] + [0] * (world.size - len(views))
    rows = torch.empty(0, 4, device=world.device) if own is None else own.float().flatten(0, 1)
    send = [sizes[world.rank] if rank == 0 else 0 for rank in range(world.size)]
    found = exchange_rows(rows, send, sizes if world.is_main else [0] * world.size, world)
    if not world.is_main:
        return [None] * len(views)
    images = found.split(sizes[: len(views)])
    return [piece.view(view.height, view.width, 4) for piece, view in zip(images, views, strict=True)]
