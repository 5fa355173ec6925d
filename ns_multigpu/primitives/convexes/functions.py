"""The 3D smooth convex as a primitive (Held et al. 2024, "3D Convex Splatting"), over the operators of `cuda_ext`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.raster.convexes import CORNERS, ConvexProjection, project_convexes, rasterize_convexes
from ns_multigpu.core.types import Hits, Points, Splats, View, stack_intrinsics, stack_viewmats
from ns_multigpu.primitives.boxed import BoxedPrimitive
from ns_multigpu.primitives.composed_kernels import refuse_options
from ns_multigpu.primitives.convexes.kernels import CONVEX_PARTS, ConvexKernels
from ns_multigpu.primitives.convexes.schema import SCHEMA
from ns_multigpu.primitives.gaussians.functions import sizes_of
from ns_multigpu.primitives.radius_clip import clip_rows

_AT_ONCE = 1 << 18
"""Points that are projected at once to find the visible ones."""


@dataclass(frozen=True)
class Convexes(BoxedPrimitive):
    """3D smooth convexes.

    `Points.params`: `means` [N, 3], centres; `corners` [N, 18], x, y, z of six points, which count from their own mean,
    so that `means` are the points' mean whatever they are; `deltas` and `sigmas` [N, 1], natural logarithms of
    smoothness and sharpness (see `cuda_ext.ops.raster.convexes`); `opacities` [N, 1], logits; `features_dc` [N, 3] and
    `features_rest` [N, R, 3], spherical harmonics, or with `sh_degree` None `features_dc` alone: logits of the colour.

    Columns of rows: see `ConvexProjection`. The probe's gradient is that of moving the whole hull on the screen. What
    has a corner nearer than `near` is not drawn.
    """

    schema = SCHEMA
    layout = CONVEX_PARTS
    row_type = ConvexProjection
    rasterize = rasterize_convexes

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


def screen_radii(splats: Splats) -> Tensor:
    """Return the screen sizes [M] for densification: 0, because the published rules use none. The visible extent of a
    soft convex says little about its hull."""
    return torch.zeros_like(splats.rows["depths"].detach())
