"""What a kind of point must say of itself to be trained by any strategy: Gaian's three functions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ns_multigpu.core.kernels import Kernels
from ns_multigpu.core.schema import Parameter
from ns_multigpu.core.types import Hits, Patch, Pixels, Points, Splats, View


class Primitive(ABC):
    """The rendering algorithm of one kind of point.

    The three functions are pure: what they return depends on their arguments alone, never on the rank. A strategy calls
    them in order and moves records between ranks in between. (Gaian, section 4: cull, splat, render.)

    Attributes:
        schema: the parameters of a point, in the order in which its kernels take them.
        depth: whether what it renders has depth.
        shown: what else its pictures show, by its names in `Pixels.extra`: numbers of a pixel.
        median: whether it can tell where a pixel's surface lies: see `with_median`.
    """

    schema: ClassVar[tuple[Parameter, ...]]
    depth: bool = False
    shown: ClassVar[Mapping[str, int]] = {}
    median: ClassVar[bool] = False

    def activated(self, points: Points, name: str) -> Tensor:
        """A parameter of the points after its activation, [N, ...]."""
        activation = next(parameter.activation for parameter in self.schema if parameter.name == name)
        return getattr(torch, activation)(points.params[name]) if activation else points.params[name]

    def showing(self) -> "Primitive":
        """The same, rendering what is `shown`."""
        return self

    def with_median(self) -> "Primitive":
        """The same, rendering `Pixels.extra["median"]` [h, w, 1]: the z-depth at which alpha passes one half, world
        units. Only where `median` says so."""
        return self

    def extents(self, points: Points) -> Tensor | None:
        """How far from its position each point can be seen, along each axis of the world, [N, 3]; None if no bound is
        known."""
        return None

    @abstractmethod
    def cull(self, points: Points, views: Sequence[View], wanted: Sequence[int]) -> Hits:
        """Which points may show in the views at positions `wanted` of `views` (ascending). May keep too many."""

    @abstractmethod
    def splat(self, points: Points, hits: Hits, views: Sequence[View]) -> Splats:
        """What each hit becomes for its view: differentiable, one row a hit, never dependent on patches."""

    @abstractmethod
    def render(
        self, splats: Splats, patches: Sequence[Patch], views: Sequence[View], *, stops: bool = False,
        windows: Tensor | None = None,
    ) -> list[Pixels]:  # fmt: skip
        """The patches, halo included, from splats that hold at least every row that shows in them.

        Args:
            stops: tell where drawing stopped (`Pixels.stops`).
            windows: [T, 2] of each of the patches' tiles the depths between which rows are drawn, the first included;
                None for all. (`cuda_ext.clip_lists`)
        """

    def kernels(self, **options: Any) -> Kernels | None:
        """The operators that do the same and more without autograd. Where there are none, None, steps go through the
        three functions.

        Args:
            options: of the update, such as `opacity_weight`; the kernels' own.
        """
        return None
