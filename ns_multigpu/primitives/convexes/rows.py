"""Rows of 3D convexes, exchanged in three parts (`primitives.record_parts`)."""

from typing import NamedTuple

from torch import Tensor

from cuda_ext.ops.raster.convexes import LINES
from ns_multigpu.primitives.part_kernels import boundless
from ns_multigpu.primitives.record_parts import RecordParts


class ConvexRows(NamedTuple):
    """See `Rows` and `cuda_ext.ops.raster.convexes.ConvexProjection`; `features` [M, 3] are colours."""

    view_ids: Tensor
    point_ids: Tensor
    count: Tensor
    means2d: Tensor
    lines: Tensor
    sharpness: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor
    radii: Tensor

    @property
    def conics(self) -> Tensor:
        """Zero conics without a bound: only a convex's box limits it."""
        return boundless(self.depths)


class ArrivedConvexes(NamedTuple):
    """Received rows of 3D convexes; see `Received`."""

    view_ids: Tensor
    means2d: Tensor
    lines: Tensor
    sharpness: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor
    radii: Tensor
    owners: Tensor
    slots: Tensor


class ConvexGradients(NamedTuple):
    """Gradients of rows."""

    means2d: Tensor
    lines: Tensor
    sharpness: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor


CONVEX_PARTS = RecordParts(
    widths={"means2d": 2, "lines": LINES, "sharpness": 0, "opacities": 0, "features": 3, "depths": 0},
    order=(
        ("means2d", 0, 2), ("lines", 0, 3), ("opacities", 0, 1), ("features", 0, 3), ("depths", 0, 1),
        ("lines", 3, 12), ("sharpness", 0, 1), ("lines", 12, LINES),
    ),
    arrived=ArrivedConvexes,
    gradients=ConvexGradients,
)  # fmt: skip
"""26 numbers of a row, and as many gradients."""
