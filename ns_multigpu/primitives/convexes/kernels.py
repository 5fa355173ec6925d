"""Step operators of 3D convexes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_layout import RowLayout
from cuda_ext.ops.raster.convexes import LINES
from ns_multigpu.core.kernels import Cameras
from ns_multigpu.core.schema import names
from ns_multigpu.primitives.boxed_kernels import BoxedKernels
from ns_multigpu.primitives.composed_kernels import RowLines
from ns_multigpu.primitives.convexes.schema import SCHEMA

if TYPE_CHECKING:
    from ns_multigpu.primitives.convexes.functions import Convexes


CONVEX_ROWS = RowLayout({"means2d": 2, "lines": LINES, "sharpness": 0, "opacities": 0, "features": 3, "depths": 0})


@dataclass(frozen=True)
class ConvexKernels(BoxedKernels):
    """Kernels of 3D convexes; see `BoxedKernels`."""

    kind: "Convexes"

    parameters = names(SCHEMA)
    title = "3D convexes"
    layout = CONVEX_ROWS
    at_once = 1 << 19
    """See `ComposedKernels`: some 300 bytes each."""

    def shows(self, params: Mapping[str, Tensor], cameras: Cameras, lines: RowLines) -> Tensor:
        _, found = self.projected(params, cameras, lines)
        return (found.radii > 0).all(-1)

    def moved(self, made: Any, records: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of the whole hull; radii are 0, because no rule uses screen sizes: see
        `convexes.functions.screen_radii`."""
        return self.layout.gradients_of(records)["means2d"], torch.zeros_like(made.depths).detach()
