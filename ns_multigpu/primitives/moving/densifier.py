"""Split rule of 4D Gaussians. The rest of densification is that of 3D Gaussians."""

import math
from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ns_multigpu.primitives.densify.regroup import SHRINK, SplitRule
from ns_multigpu.primitives.moving.turning import turn

WHOLE = 0.0
"""The logarithm of the capture's length, 1."""


class MovingSplitRule(SplitRule):
    """Split rule whose halves are drawn from their parent's Gaussian over space and time. They are smaller along all
    four axes (Yang et al. 2024, section 3.3).

    A point that lasts longer than the whole capture is split in space alone: drawn over its time, most halves would lie
    before the capture or after it, and fade out of all of it.
    """

    draws: ClassVar[int] = 4

    def offsets(self, params: Mapping[str, Tensor], drawn: Tensor) -> Tensor:
        """See `SplitRule`: [2, C, 4], time last."""
        lasting = params["durations"][:, :1] >= WHOLE
        drawn = torch.cat([drawn[..., :1].masked_fill(lasting, 0.0), drawn[..., 1:]], dim=-1)
        t, x, y, z = (turn(params) * drawn[..., None, :]).unbind(-1)
        return (t + x + y + z).roll(-1, dims=-1)

    def move(self, name: str, rows: Tensor, offsets: Tensor) -> None:
        """See `SplitRule`."""
        super().move(name, rows, offsets)
        if name == "times":
            rows += offsets[:, 3:]
        elif name == "durations":
            rows -= math.log(SHRINK) * (rows < WHOLE)

    def moved(self) -> Collection[str]:
        """See `SplitRule`."""
        return ("means", "times", "durations")
