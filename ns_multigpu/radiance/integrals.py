"""Integrals along a ray that can be broken at cells: each segment by itself, then joined (NeRF-XL, appendix B.2).

The state of a stretch of a ray is what its integrals are from its own beginning on, as if nothing were before it. The
states of two stretches, one behind the other, join to that of both; joining is associative, which is all that breaking
an integral takes. The paper's family, sums of products over segments, is what comes of joins that add and multiply.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ns_multigpu.radiance.sums import running_sum

State = Mapping[str, Tensor]
"""Name of an integral -> [n, width] its value over each of n stretches."""

TRANSMITTANCE = "transmittance"

_DENSEST = 1e30
"""The most that a density counts as. Networks reach infinity, which a sample without length would make NaN."""


@dataclass(frozen=True)
class Samples:
    """The samples of n segments, equally many in each, front to back.

    Attributes:
        edges: [n, S + 1] ascending distances along the ray: sample i is from edge i to edge i + 1.
        density: [n, S], per unit of distance.
        coordinates: [n, S + 1] the edges in the coordinate that distortion is measured in.
        values: name -> [n, S, C] what is integrated beside: "colour", and whatever a user's integral asks for.
    """

    edges: Tensor
    density: Tensor
    coordinates: Tensor
    values: Mapping[str, Tensor]

    @property
    def middles(self) -> Tensor:
        """[n, S] the distance of each sample's middle."""
        return _middles(self.edges)

    @cached_property
    def depth(self) -> Tensor:
        """[n, S] optical depth of each sample."""
        return optical_depth(self.density, self.edges)

    @cached_property
    def weights(self) -> Tensor:
        """[n, S] w = T (1 - exp(-density length)): what a segment's beginning sees of each sample."""
        # Not the sum up to a sample less its own: what is left of a small number beside a large one would be rounding.
        before = torch.cat([torch.zeros_like(self.depth[:, :1]), running_sum(self.depth)[:, :-1]], 1)
        return torch.exp(-before) * -torch.expm1(-self.depth)


def optical_depth(density: Tensor, edges: Tensor) -> Tensor:
    """[n, S] of samples [n, S] between edges [n, S + 1]; finite, and so is its gradient, however dense they are.

    In a segment of a few roundings' length edges go back by one now and then. Such a sample has no length: a negative
    one would let through more light than there is.
    """
    return density.clamp_max(_DENSEST) * edges.diff(dim=1).clamp_min(0)


class Breakable(Protocol):
    """An integral along a ray that can be broken.

    Attributes:
        name: its place in a `State`.
        width: how many numbers it is.
        empty: its value over a stretch in which there is nothing.
    """

    @property
    def name(self) -> str: ...

    @property
    def width(self) -> int: ...

    @property
    def empty(self) -> float: ...

    def within(self, samples: Samples) -> Tensor:
        """[n, width] of each segment alone."""
        ...

    def join(self, front: State, back: State) -> Tensor:
        """[n, width] of two stretches together, the one in front first; they may read other integrals of both."""
        ...


@dataclass(frozen=True)
class Transmittance:
    """What of the light behind a stretch comes through it (equation 4). Opacity, equation 5, is 1 minus this."""

    name: str = TRANSMITTANCE
    width: int = 1
    empty: float = 1.0

    def within(self, samples: Samples) -> Tensor:
        return torch.exp(-samples.depth.sum(1, keepdim=True))

    def join(self, front: State, back: State) -> Tensor:
        return front[TRANSMITTANCE] * back[TRANSMITTANCE]


@dataclass(frozen=True)
class Weighted:
    """The integral of T density f along the ray: colour (equation 3), depth (equation 6), normals, features.

    Attributes:
        of: the samples -> f, [n, S, width].
    """

    name: str
    width: int
    of: Callable[[Samples], Tensor]
    empty: float = 0.0

    def within(self, samples: Samples) -> Tensor:
        return (samples.weights[:, :, None] * self.of(samples)).sum(1)

    def join(self, front: State, back: State) -> Tensor:
        return front[self.name] + front[TRANSMITTANCE] * back[self.name]


@dataclass(frozen=True)
class Distortion:
    """Mip-NeRF 360's distortion loss of a ray, exactly (NeRF-XL, equations 2, 7 and 8).

    Weights are spread evenly over their samples. Of `Samples.coordinates` it wants the mean as well, the integral
    `moment` in the same family. (The paper's algorithm 2 leaves out the factor 2 that equation 7 has; it is here.)
    """

    name: str = "distortion"
    width: int = 1
    empty: float = 0.0
    moment: str = "moment"

    def within(self, samples: Samples) -> Tensor:
        w, u = samples.weights, _middles(samples.coordinates)
        # The sum over pairs in time linear in their number: what is in front of each sample, and its moment.
        before, moment = running_sum(w) - w, running_sum(w * u) - w * u
        between = 2 * (w * (u * before - moment)).sum(1, keepdim=True)
        return between + (w.square() * samples.coordinates.diff(dim=1)).sum(1, keepdim=True) / 3

    def join(self, front: State, back: State) -> Tensor:
        through = front[TRANSMITTANCE]
        apart = back[self.moment] * (1 - through) - (1 - back[TRANSMITTANCE]) * front[self.moment]
        return front[self.name] + through.square() * back[self.name] + 2 * through * apart


@dataclass(frozen=True)
class Last:
    """A value of the last sample of a ray: nerfacto's background, "last_sample".

    One number more says whether a stretch has a sample: of two, the one behind counts if it has.
    """

    name: str
    width: int
    of: Callable[[Samples], Tensor]
    empty: float = 0.0

    def within(self, samples: Samples) -> Tensor:
        last = self.of(samples)[:, -1]
        return torch.cat([last, torch.ones_like(last[:, :1])], 1)

    def join(self, front: State, back: State) -> Tensor:
        return torch.where(back[self.name][:, -1:] > 0, back[self.name], front[self.name])


def _middles(edges: Tensor) -> Tensor:
    return (edges[:, 1:] + edges[:, :-1]) / 2


COLOUR = Weighted("colour", 3, lambda samples: samples.values["colour"])
DEPTH = Weighted("depth", 1, lambda samples: samples.middles[:, :, None])
MOMENT = Weighted("moment", 1, lambda samples: _middles(samples.coordinates)[:, :, None])
BACKGROUND = Last("background", 4, lambda samples: samples.values["colour"])
"""The colour of the last sample, and whether there is one."""


class Family:
    """Integrals that are broken and joined together: what a segment sends.

    Args:
        members: the integrals; the transmittance is always one and need not be named.

    Raises:
        ValueError: two have one name.
    """

    def __init__(self, members: Sequence[Breakable]) -> None:
        self.members: tuple[Breakable, ...] = (Transmittance(), *members)
        names = [one.name for one in self.members]
        if len(set(names)) < len(names):
            raise ValueError(f"integrals along a ray need names of their own; these are {', '.join(names)}")
        self.width = sum(one.width for one in self.members)
        self._none: Tensor | None = None

    def within(self, samples: Samples) -> Tensor:
        """[n, width] the states of segments, packed: what `fold` takes."""
        return torch.cat([one.within(samples) for one in self.members], 1)

    def unpacked(self, rows: Tensor) -> State:
        """The states [n, width] by name."""
        parts = rows.split([one.width for one in self.members], 1)
        return {one.name: part for one, part in zip(self.members, parts, strict=True)}

    def empty(self, count: int, like: Tensor) -> Tensor:
        """[count, width] the states of stretches in which there is nothing."""
        if self._none is None or self._none.device != like.device or self._none.dtype != like.dtype:
            # Kept: it comes from the host, which a CUDA graph must not wait for.
            self._none = like.new_tensor([one.empty for one in self.members for _ in range(one.width)])
        return self._none.expand(count, -1)

    def fold(self, rows: Tensor, order: Tensor) -> tuple[State, Tensor]:
        """Joins the segments of each ray, front to back (algorithms 1 and 2).

        Args:
            rows: [M, width] the states of all segments.
            order: [R, K] as of `Segments.order`: which of them, M for none.

        Returns:
            the states of whole rays, by name; and [M, 1] the transmittance before each segment, without a gradient.
        """
        rows = torch.cat([rows, self.empty(1, rows)])
        whole = self.unpacked(self.empty(len(order), rows))
        before = rows.new_ones(len(rows), 1)
        for column in order.unbind(1):
            before[column] = whole[TRANSMITTANCE].detach()
            back = self.unpacked(rows.index_select(0, column))
            whole = {one.name: one.join(whole, back) for one in self.members}
        return whole, before[:-1]
