"""Step operators of 3D convexes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ns_multigpu.core.kernels import Cameras
from ns_multigpu.core.schema import names
from ns_multigpu.core.types import Points
from ns_multigpu.primitives.composed_kernels import RowLines
from ns_multigpu.primitives.convexes.rows import CONVEX_PARTS, ConvexRows
from ns_multigpu.primitives.convexes.schema import SCHEMA
from ns_multigpu.primitives.part_kernels import PartKernels

if TYPE_CHECKING:
    from ns_multigpu.primitives.convexes.functions import Convexes


class MadeConvexes(NamedTuple):
    """Projected lines: `ConvexProjection`, and colours [M, 3]."""

    means2d: Tensor
    lines: Tensor
    sharpness: Tensor
    depths: Tensor
    row_opacities: Tensor
    radii: Tensor
    colors: Tensor


@dataclass(frozen=True)
class ConvexKernels(PartKernels):
    """Kernels of 3D convexes; see `PartKernels`."""

    kind: "Convexes"

    parameters = names(SCHEMA)
    title = "3D convexes"
    operator = "convexes"
    layout = CONVEX_PARTS
    row_type = ConvexRows
    record_floats = CONVEX_PARTS.record_floats
    at_once = 1 << 19
    """See `ComposedKernels`: some 300 bytes each."""

    def made(self, params: Mapping[str, Tensor], cameras: Cameras, lines: RowLines) -> MadeConvexes:
        points = Points(dict(params))
        found = self.kind.project(points, *lines, cameras.viewmats, cameras.Ks, cameras.sizes)
        return MadeConvexes(*found, self.kind.colors(points, *lines, cameras.viewmats))

    def shows(self, params: Mapping[str, Tensor], cameras: Cameras, lines: RowLines) -> Tensor:
        found = self.kind.project(Points(dict(params)), *lines, cameras.viewmats, cameras.Ks, cameras.sizes)
        return (found.radii > 0).all(-1)

    def moved(self, made: MadeConvexes, records: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of the whole hull; radii are 0, because no rule uses screen sizes: see
        `convexes.functions.screen_radii`."""
        return self.layout.gradients_of(records).means2d, torch.zeros_like(made.depths).detach()
