"""Split rule of 3D convexes: six smaller ones around the corners. The rest of densification is that of 3D Gaussians."""

import math
from collections.abc import Collection, Mapping
from typing import ClassVar

from torch import Tensor

from cuda_ext.ops.raster.convexes import CORNERS
from ns_multigpu.primitives.densify.regroup import SplitRule
from ns_multigpu.primitives.deterministic import logit, sigmoid

SMALLER = 0.63
"""A child's corners, in units of its parent's (the published code's)."""
SHARPER = 2.3
"""A child's sigma, in units of its parent's. The published code multiplies the logarithm by 0.88, which at its first
sigma, 0.00095, is this."""
FAINTER = 0.5
"""A child's opacity, in units of its parent's (the published code's)."""


def arms(corners: Tensor) -> Tensor:
    """Return corners [N, 6, 3] relative to their mean from raw ones [N, 18], bit-identical for any other rows."""
    a, b, c, d, e, f = (by_corner := corners.view(-1, CORNERS, 3)).unbind(1)
    return by_corner - ((a + b + c + d + e + f) * (1 / CORNERS))[:, None]


class ConvexParts(SplitRule):
    """A split's six children: each has its parent's shape, smaller, and its centre at one of the parent's corners
    (Held et al. 2024, section 3.4). Nothing is cloned. A convex's size is the largest of its corners' standard
    deviations along the world's axes."""

    draws: ClassVar[int] = 0
    num_children: ClassVar[int] = CORNERS
    clones: ClassVar[bool] = False
    shrunk: ClassVar[Collection[str]] = ()

    def sizes(self, params: Mapping[str, Tensor]) -> Tensor:
        """See `SplitRule`."""
        a, b, c, d, e, f = arms(params["corners"].detach()).square().unbind(1)
        return ((a + b + c + d + e + f) * (1 / CORNERS)).amax(-1).sqrt()

    def child_sizes(self, sizes: Tensor) -> Tensor:
        """See `SplitRule`."""
        return sizes * SMALLER

    def child_opacities(self, opacities: Tensor) -> Tensor:
        """See `SplitRule`."""
        return opacities * FAINTER

    def offsets(self, params: Mapping[str, Tensor], drawn: Tensor) -> Tensor:
        """See `SplitRule`: [6, C, 3]."""
        return arms(params["corners"]).transpose(0, 1)

    def move(self, name: str, rows: Tensor, offsets: Tensor) -> None:
        """See `SplitRule`."""
        super().move(name, rows, offsets)
        if name == "corners":
            rows *= SMALLER
        elif name == "sigmas":
            rows += math.log(SHARPER)
        elif name == "opacities":
            rows.copy_(logit(sigmoid(rows) * FAINTER))

    def moved(self) -> Collection[str]:
        """See `SplitRule`."""
        return ("means", "corners", "sigmas", "opacities")
