"""Rows of 2D Gaussians, exchanged in two parts (`primitives.record_parts`)."""

from typing import NamedTuple

from torch import Tensor

from ns_multigpu.primitives.part_kernels import boundless
from ns_multigpu.primitives.record_parts import RecordParts


class SurfelRows(NamedTuple):
    """See `Rows` and `cuda_ext.ops.raster.surfels.SurfelProjection`; `features` [M, 3] are colours."""

    view_ids: Tensor
    point_ids: Tensor
    count: Tensor
    means2d: Tensor
    transforms: Tensor
    normals: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor
    radii: Tensor

    @property
    def conics(self) -> Tensor:
        """Zero conics without a bound: only a splat's box limits it."""
        return boundless(self.depths)


class ArrivedSurfels(NamedTuple):
    """Received rows of 2D Gaussians; see `Received`."""

    view_ids: Tensor
    means2d: Tensor
    transforms: Tensor
    normals: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor
    radii: Tensor
    owners: Tensor
    slots: Tensor


class SurfelGradients(NamedTuple):
    """Gradients of rows."""

    means2d: Tensor
    transforms: Tensor
    normals: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor


SURFEL_PARTS = RecordParts(
    widths={"means2d": 2, "transforms": 9, "normals": 3, "opacities": 0, "features": 3, "depths": 0},
    order=(
        ("means2d", 0, 2), ("transforms", 0, 3), ("opacities", 0, 1), ("features", 0, 3), ("depths", 0, 1),
        ("transforms", 3, 9), ("normals", 0, 3),
    ),
    arrived=ArrivedSurfels,
    gradients=SurfelGradients,
)  # fmt: skip
"""22 numbers of a row, and 19 gradients: one more than two parts hold, so that absolute ones are exchanged too."""
