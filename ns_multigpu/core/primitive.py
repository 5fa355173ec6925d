"""Interface of a primitive: the three functions of Gaian (cull, splat, render), which any strategy can train."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ns_multigpu.core.kernels import Kernels
from ns_multigpu.core.schema import Parameter
from ns_multigpu.core.types import Hits, Patch, Pixels, Points, Splats, View


class Primitive(ABC):
    """Rendering algorithm of one primitive.

    The three functions are pure: their results depend on the arguments alone, never on the rank. A strategy calls them
    in order and exchanges records between them. (Gaian, section 4: cull, splat, render.)

    Attributes:
        schema: the parameters of a point, in the order in which its kernels take them.
        depth: True if it renders depth.
        shown: number of channels of its extra images, by their names in `Pixels.extra`.
        median: True if it can render the median depth: see `with_median`.
    """

    schema: ClassVar[tuple[Parameter, ...]]
    depth: bool = False
    shown: ClassVar[Mapping[str, int]] = {}
    median: ClassVar[bool] = False

    def activated(self, points: Points, name: str) -> Tensor:
        """Return a parameter of the points after its activation, [N, ...]."""
        activation = next(parameter.activation for parameter in self.schema if parameter.name == name)
        return getattr(torch, activation)(points.params[name]) if activation else points.params[name]

    def showing(self) -> "Primitive":
        """Return the same primitive, rendering the extra images of `shown`."""
        return self

    def with_median(self) -> "Primitive":
        """Return the same primitive, rendering `Pixels.extra["median"]` [h, w, 1]: the z-depth in world units at which
        alpha exceeds one half. Requires `median`."""
        return self

    def extents(self, points: Points) -> Tensor | None:
        """Return the half-widths of each point's visible box along the world's axes, [N, 3]; None if unknown."""
        return None

    @abstractmethod
    def cull(self, points: Points, views: Sequence[View], wanted: Sequence[int]) -> Hits:
        """Return the points that may be visible in the views at positions `wanted` of `views` (ascending). May keep too
        many."""

    @abstractmethod
    def splat(self, points: Points, hits: Hits, views: Sequence[View]) -> Splats:
        """Return one differentiable row per hit: the point as its view sees it. The result never depends on patches."""

    @abstractmethod
    def render(
        self, splats: Splats, patches: Sequence[Patch], views: Sequence[View], *, stops: bool = False,
        windows: Tensor | None = None,
    ) -> list[Pixels]:  # fmt: skip
        """Render the patches, halo included, from splats that contain at least every visible row.

        Args:
            stops: return where drawing stopped (`Pixels.stops`).
            windows: [T, 2] depth interval of each of the patches' tiles, the first depth included; None for all depths.
                (`cuda_ext.clip_lists`)
        """

    def kernels(self, **options: Any) -> Kernels | None:
        """Return the equivalent fused operators without autograd; None if there are none, and steps use the three
        functions.

        Args:
            options: of the update, such as `opacity_weight`; the kernels' own.
        """
        return None
