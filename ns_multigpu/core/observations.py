"""Observations of views: points of known depth, of a reconstruction or depth maps, and directions of known normal."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Observations:
    """Points of known position, and which of them a view, or each of several, observes.

    Attributes:
        points: [P, 3] positions in the world, or with `normals` in OpenCV's axes of the camera that observes them; P is
            at least 1.
        ids: of a view [K], of B views [B, K]: rows of `points`, int32; -1 where a view observes fewer than K.
        scale: the size of the scene in world units: a disparity times it has no unit.
        normals: [P, 3] unit normals, in the camera's axes, of the surfaces seen in the directions of the points.
    """

    points: Tensor
    ids: Tensor
    scale: float
    normals: Tensor | None = None

    def of(self, view: int) -> "Observations":
        """Return the observations of one of several views."""
        return replace(self, ids=self.ids[view])
