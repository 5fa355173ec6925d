"""Points that views observe with known depth: those of a reconstruction, or pixels of depth maps."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Observations:
    """Points of known position, and which of them a view, or each of several, observes.

    Attributes:
        points: [P, 3] positions in the world; P is at least 1.
        ids: of a view [K], of B views [B, K]: rows of `points`, int32; -1 where a view observes fewer than K.
        scale: the size of the scene in world units: a disparity times it has no unit.
    """

    points: Tensor
    ids: Tensor
    scale: float

    def of(self, view: int) -> "Observations":
        """Return the observations of one of several views."""
        return replace(self, ids=self.ids[view])
