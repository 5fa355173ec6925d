"""Integrals along a ray that can be split at cells and joined again (NeRF-XL, appendix B.2).

The state of a stretch of a ray is its integrals from its own beginning, as if nothing were before it. The states of two
consecutive stretches join to that of both, associatively, which is all that a split needs. The paper's family, sums of
products over segments, follows from joins that add and multiply.
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
"""Maximum density. Networks can output infinity, which a zero-length sample would turn into NaN."""


@dataclass(frozen=True)
class Samples:
    """The samples of n segments, equally many in each, front to back.

    Attributes:
        edges: [n, S + 1] ascending distances along the ray: sample i is from edge i to edge i + 1.
        density: [n, S], per unit of distance.
        coordinates: [n, S + 1] the edges in the coordinate of the distortion loss.
        values: name -> [n, S, C] other integrands: "colour", and those of a user's integrals.
    """

    edges: Tensor
    density: Tensor
    coordinates: Tensor
    values: Mapping[str, Tensor]

    @property
    def middles(self) -> Tensor:
        """Distance of each sample's middle, [n, S]."""
        return _middles(self.edges)

    @cached_property
    def depth(self) -> Tensor:
        """Optical depth of each sample, [n, S]."""
        return optical_depth(self.density, self.edges)

    @cached_property
    def weights(self) -> Tensor:
        """Weights w = T (1 - exp(-density length)) of samples seen from the segment's beginning, [n, S]."""
        # Not the inclusive sum less its last term: a small number next to a large one would be lost to rounding.
        before = torch.cat([torch.zeros_like(self.depth[:, :1]), running_sum(self.depth)[:, :-1]], 1)
        return torch.exp(-before) * -torch.expm1(-self.depth)


def optical_depth(density: Tensor, edges: Tensor) -> Tensor:
    """Return optical depths [n, S] of samples between edges [n, S + 1]; finite for any density, as is the gradient.

    In a segment about as short as rounding errors, edges may decrease. Such a sample gets length zero: a negative
    length would create light.
    """
    return density.clamp_max(_DENSEST) * edges.diff(dim=1).clamp_min(0)


class Breakable(Protocol):
    """Interface of an integral along a ray that can be split.

    Attributes:
        name: its key in a `State`.
        width: number of components.
        empty: its value over an empty stretch.
    """

    @property
    def name(self) -> str: ...

    @property
    def width(self) -> int: ...

    @property
    def empty(self) -> float: ...

    def within(self, samples: Samples) -> Tensor:
        """Return the values [n, width] of each segment alone."""
        ...

    def join(self, front: State, back: State) -> Tensor:
        """Return the values [n, width] of two stretches together, front first; other integrals of both may be read."""
        ...


@dataclass(frozen=True)
class Transmittance:
    """Fraction of light transmitted through a stretch (equation 4). Opacity, equation 5, is 1 minus this."""

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
    """Mip-NeRF 360's distortion loss of a ray, exact (NeRF-XL, equations 2, 7 and 8).

    Weights are constant over their samples. It needs the mean of `Samples.coordinates` as well, the integral `moment`
    in the same family. (The paper's algorithm 2 omits the factor 2 of equation 7; this class has it.)
    """

    name: str = "distortion"
    width: int = 1
    empty: float = 0.0
    moment: str = "moment"

    def within(self, samples: Samples) -> Tensor:
        w, u = samples.weights, _middles(samples.coordinates)
        # The sum over pairs in linear time: the weights in front of each sample, and their moment.
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

    One more component is positive if the samples of a stretch have a length; the last such stretch counts.
    """

    name: str
    width: int
    of: Callable[[Samples], Tensor]
    empty: float = 0.0

    def within(self, samples: Samples) -> Tensor:
        last = self.of(samples)[:, -1]
        return torch.cat([last, (samples.edges[:, -1:] > samples.edges[:, :1]).to(last)], 1)

    def join(self, front: State, back: State) -> Tensor:
        return torch.where(back[self.name][:, -1:] > 0, back[self.name], front[self.name])


def _middles(edges: Tensor) -> Tensor:
    return (edges[:, 1:] + edges[:, :-1]) / 2


COLOUR = Weighted("colour", 3, lambda samples: samples.values["colour"])
DEPTH = Weighted("depth", 1, lambda samples: samples.middles[:, :, None])
MOMENT = Weighted("moment", 1, lambda samples: _middles(samples.coordinates)[:, :, None])
BACKGROUND = Last("background", 4, lambda samples: samples.values["colour"])
"""The colour of the last sample, and a flag that is positive if there is one."""


class Family:
    """Integrals that are split and joined together: the content of an exchanged segment.

    Args:
        members: the integrals; the transmittance is always included and must not be listed.

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
        """Return the packed states of segments, [n, width], for `fold`."""
        return torch.cat([one.within(samples) for one in self.members], 1)

    def unpacked(self, rows: Tensor) -> State:
        """Return the states [n, width] by name."""
        parts = rows.split([one.width for one in self.members], 1)
        return {one.name: part for one, part in zip(self.members, parts, strict=True)}

    def empty(self, count: int, like: Tensor) -> Tensor:
        """Return the states of empty stretches, [count, width]."""
        if self._none is None or self._none.device != like.device or self._none.dtype != like.dtype:
            # Cached: it comes from the host, which a CUDA graph must not wait for.
            self._none = like.new_tensor([one.empty for one in self.members for _ in range(one.width)])
        return self._none.expand(count, -1)

    def fold(self, rows: Tensor, order: Tensor) -> tuple[State, Tensor]:
        """Join the segments of each ray, front to back (algorithms 1 and 2).

        Args:
            rows: [M, width] the states of all segments.
            order: [R, K] as of `Segments.order`: segment indices, M for none.

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
