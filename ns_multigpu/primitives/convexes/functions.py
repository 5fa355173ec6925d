"""The 3D smooth convex as a primitive (Held et al. 2024, "3D Convex Splatting"), over the operators of `cuda_ext`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from cuda_ext.ops.raster.convexes import CORNERS, ConvexProjection, convex_lists, project_convexes, rasterize_convexes
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.types import TILE, Hits, Patch, Pixels, Points, Splats, View, stack_intrinsics, stack_viewmats
from ns_multigpu.primitives.composed_kernels import refuse_options
from ns_multigpu.primitives.convexes.kernels import ConvexKernels
from ns_multigpu.primitives.convexes.schema import SCHEMA
from ns_multigpu.primitives.gaussians.functions import sizes_of
from ns_multigpu.primitives.radius_clip import clip_rows
from ns_multigpu.primitives.shading import row_colors

_AT_ONCE = 1 << 18
"""Points that are projected at once to find the visible ones."""


@dataclass(frozen=True)
class Convexes(Primitive):
    """3D smooth convexes.

    `Points.params`: `means` [N, 3], centres; `corners` [N, 18], x, y, z of six points, which count from their own mean,
    so that `means` are the points' mean whatever they are; `deltas` and `sigmas` [N, 1], natural logarithms of
    smoothness and sharpness (see `cuda_ext.ops.raster.convexes`); `opacities` [N, 1], logits; `features_dc` [N, 3] and
    `features_rest` [N, R, 3], spherical harmonics, or with `sh_degree` None `features_dc` alone: logits of the colour.

    Attributes:
        sh_degree: harmonics in use now, 0 to 3; None for plain colours.
        depth: render expected depth as well: of the depths of centres.
        near, far: depths of centres beyond which nothing is drawn; what has a corner nearer than `near` is not, either.
        radius_clip: half extents in pixels up to which a splat is not drawn; see `clip_rows`.
    """

    sh_degree: int | None = 3
    depth: bool = False
    near: float = 0.01
    far: float = 1e10
    radius_clip: float = 0.0

    schema = SCHEMA

    @torch.no_grad()
    def cull(self, points: Points, views: Sequence[View], wanted: Sequence[int]) -> Hits:
        """See `Primitive.cull`: projects all points, and returns exactly those drawn in the complete view.

        The visible margin of a convex depends on its hull's edges on the screen, so no bound in space is known.
        """
        nothing = torch.empty(0, dtype=torch.int32, device=points.params["means"].device)
        found: list[tuple[Tensor, Tensor]] = [(nothing, nothing)]
        for v in wanted:
            for start in range(0, len(points), _AT_ONCE):
                some = {name: value[start : start + _AT_ONCE] for name, value in points.params.items()}
                ids = torch.arange(len(some["means"]), dtype=torch.int32, device=nothing.device)
                one = [views[v]]
                cameras = (stack_viewmats(one), stack_intrinsics(one), sizes_of(one))
                rows = self.project(Points(some), torch.zeros_like(ids), ids, *cameras)
                shown = (rows.radii[:, 0] > 0).nonzero()[:, 0].int() + start
                found.append((torch.full_like(shown, v), shown))
        view_ids, point_ids = (torch.cat(column) for column in zip(*found, strict=True))
        return Hits(view_ids, point_ids)

    def splat(self, points: Points, hits: Hits, views: Sequence[View]) -> Splats:
        """See `Primitive.splat`.

        Rows: `means2d` [M, 2] pixels; `lines` [M, 18] of the hull's edges around it; `sharpness` [M]; `opacities` [M];
        `features` [M, 3] colours; `depths` [M]; `radii` [M, 2]. See `ConvexProjection`.

        The probe's gradient is that of `means2d`: of moving the whole hull on the screen.
        """
        viewmats = stack_viewmats(views)
        cameras = (viewmats, stack_intrinsics(views), sizes_of(views))
        rows = self.project(points, hits.view_ids, hits.point_ids, *cameras)
        probe = torch.zeros_like(rows.means2d, requires_grad=torch.is_grad_enabled())
        columns = {
            "means2d": rows.means2d + probe,
            "lines": rows.lines,
            "sharpness": rows.sharpness,
            "opacities": rows.row_opacities,
            "features": self.colors(points, hits.view_ids, hits.point_ids, viewmats),
            "depths": rows.depths,
            "radii": rows.radii,
        }
        return Splats(hits, columns, probe)

    def render(
        self, splats: Splats, patches: Sequence[Patch], views: Sequence[View], *, stops: bool = False,
        windows: Tensor | None = None,
    ) -> list[Pixels]:  # fmt: skip
        """See `Primitive.render`."""
        rows = splats.rows
        rectangles = [patch.rendered(views[patch.view]) for patch in patches]
        flat = [n for patch, rectangle in zip(patches, rectangles, strict=True) for n in (patch.view, *rectangle)]
        names = ("means2d", "lines", "sharpness", "depths", "opacities", "radii")
        drawn = ConvexProjection(*(rows[name] for name in names))
        tile_offsets, row_ids = convex_lists(drawn, splats.hits.view_ids, flat, TILE)
        if windows is not None:
            depths = rows["depths"].detach()
            tile_offsets, row_ids = cuda_ext.clip_lists(tile_offsets, row_ids, depths, windows.to(depths.dtype))
        pixels = rasterize_convexes(drawn, rows["features"], tile_offsets, row_ids, flat, TILE)
        stopped = pixels.alphas.detach() < 0
        alphas = torch.where(stopped, -pixels.alphas, pixels.alphas)
        result: list[Pixels] = []
        start = 0
        for patch, (x0, y0, x1, y1) in zip(patches, rectangles, strict=True):
            piece = slice(start, start + (y1 - y0) * (x1 - x0))
            start, shape = piece.stop, (y1 - y0, x1 - x0, -1)
            alpha = alphas[piece].view(shape)
            depth = pixels.depths[piece].view(shape) / alpha.clamp(min=1e-10) if self.depth else None
            where = stopped[piece].view(shape) if stops else None
            result.append(Pixels(patch, pixels.colors[piece].view(shape), alpha, depth, where))
        return result

    def kernels(self, **options: Any) -> ConvexKernels:
        """See `Primitive.kernels`: `depth`.

        Raises:
            ValueError: an option is set that only 3D Gaussians' kernels support.
        """
        refuse_options(options, ConvexKernels.title)
        return ConvexKernels(self, bool(options.get("depth")))

    def project(
        self, points: Points, view_ids: Tensor, point_ids: Tensor, viewmats: Tensor, Ks: Tensor, sizes: Sequence[int]
    ) -> ConvexProjection:
        """Return the screen geometry of rows; see `cuda_ext.ops.raster.convexes.project_convexes`."""
        corners = points.params["corners"].view(-1, CORNERS, 3)
        rows = project_convexes(
            points.params["means"],
            (corners - corners.mean(1, keepdim=True)).flatten(1),
            self.activated(points, "deltas").reshape(-1),
            self.activated(points, "sigmas").reshape(-1),
            self.activated(points, "opacities").reshape(-1),
            viewmats,
            Ks,
            sizes=sizes,
            view_ids=view_ids,
            point_ids=point_ids,
            near=self.near,
            far=self.far,
        )
        return clip_rows(rows, self.radius_clip)

    def colors(self, points: Points, view_ids: Tensor, point_ids: Tensor, viewmats: Tensor) -> Tensor:
        """Return the colours [M, 3] of rows."""
        return row_colors(points.params, self.sh_degree, viewmats, view_ids, point_ids)


def screen_radii(splats: Splats) -> Tensor:
    """Return the screen sizes [M] for densification: 0, because the published rules use none. The visible extent of a
    soft convex says little about its hull."""
    return torch.zeros_like(splats.rows["depths"].detach())
