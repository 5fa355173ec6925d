"""The 3D smooth convex as a primitive (Held et al. 2024, "3D Convex Splatting"), over the operators of `cuda_ext`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.raster.convexes import CONVEXES, CORNERS
from ns_multigpu.core.types import Points, Splats
from ns_multigpu.primitives.boxed import BoxedPrimitive
from ns_multigpu.primitives.composed_kernels import refuse_options
from ns_multigpu.primitives.convexes.kernels import CONVEX_ROWS, ConvexKernels
from ns_multigpu.primitives.convexes.schema import SCHEMA

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
    layout = CONVEX_ROWS
    operators = CONVEXES

    @torch.no_grad()
    def overlapping(self, points: Points, viewmat: Tensor, K: Tensor, size: Sequence[int]) -> Tensor:
        """See `BoxedPrimitive.overlapping`: projects all points, and returns exactly those drawn in the complete view.

        The visible margin of a convex depends on its hull's edges on the screen, so no bound in space is known.
        """
        found = [torch.empty(0, dtype=torch.bool, device=viewmat.device)]
        for start in range(0, len(points), _AT_ONCE):
            some = Points({name: value[start : start + _AT_ONCE] for name, value in points.params.items()})
            ids = torch.arange(len(some), dtype=torch.int32, device=viewmat.device)
            rows = self.project(some, torch.zeros_like(ids), ids, viewmat[None], K[None], size)
            found.append(rows.radii[:, 0] > 0)
        return torch.cat(found)

    def kernels(self, **options: Any) -> ConvexKernels:
        """See `Primitive.kernels`: `depth`.

        Raises:
            ValueError: an option is set that only 3D Gaussians' kernels support.
        """
        refuse_options(options, ConvexKernels.title)
        return ConvexKernels(self, bool(options.get("depth")))

    def columns(self, points: Points) -> tuple[Tensor, ...]:
        """See `BoxedPrimitive.columns`."""
        corners = points.params["corners"].view(-1, CORNERS, 3)
        rest = (self.activated(points, name).reshape(-1) for name in ("deltas", "sigmas", "opacities"))
        return points.params["means"], (corners - corners.mean(1, keepdim=True)).flatten(1), *rest


def screen_radii(splats: Splats) -> Tensor:
    """Return the screen sizes [M] for densification: 0, because the published rules use none. The visible extent of a
    soft convex says little about its hull."""
    return torch.zeros_like(splats.rows["depths"].detach())
