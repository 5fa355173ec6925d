"""Sample positions of segments: nerfstudio's two samplers without device readbacks or uploads.

Results equal those of nerfstudio 1.1.5's `UniformLinDispPiecewiseSampler`, `UniformSampler` and `PDFSampler`. Random
numbers are arguments: they follow from a ray's number in its batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.radiance.integrals import optical_depth
from ns_multigpu.radiance.partition import distance, spacing
from ns_multigpu.radiance.sums import running_sum

_PADDING, _LEAST = 0.01, 1e-5
"""Constant added to each weight before sampling, and the minimum sum of weights."""


@dataclass(frozen=True)
class Ends:
    """Begin and end of segments.

    Attributes:
        near, far: [n, 1] of segments. whole: [n, 1] each, of their whole rays.
        uniform: True to space samples by distance, False by nerfacto's piecewise coordinate.
    """

    near: Tensor
    far: Tensor
    whole: tuple[Tensor, Tensor]
    uniform: bool

    def distances(self, spaced: Tensor) -> Tensor:
        """Return distances along rays [n, K] of positions in segments from 0 to 1."""
        if self.uniform:
            return spaced * self.far + (1 - spaced) * self.near
        return distance(spaced * spacing(self.far) + (1 - spaced) * spacing(self.near))


@dataclass(frozen=True)
class Bins:
    """Samples of n segments: sample i lies between edges i and i + 1.

    Attributes:
        spaced: [n or 1, S + 1] edges in segments, from 0 to 1. edges: [n, S + 1] as distances along rays.
    """

    spaced: Tensor
    edges: Tensor

    @property
    def starts(self) -> Tensor:
        """Begin of each sample, [n, S, 1]."""
        return self.edges[:, :-1, None]

    @property
    def ends(self) -> Tensor:
        """End of each sample, [n, S, 1]."""
        return self.edges[:, 1:, None]

    def within(self, ends: Ends, near: Tensor, far: Tensor) -> "Bins":
        """Return the parts of whole rays' bins that are inside segments; bins outside get length zero.

        Args:
            ends: of the segments. near, far: [n, 1] the segments' ends in their whole rays, from 0 to 1.
        """
        return Bins(self.spaced.maximum(near).minimum(far), self.edges.maximum(ends.near).minimum(ends.far))

    def up_to_faces(self, ends: Ends) -> "Bins":
        """Return the bins with the outermost samples widened to the faces between cells.

        nerfstudio's samples end slightly before a ray's ends, which is harmless there. At a face it would leave a
        visible seam.
        """
        front, back = ends.near > ends.whole[0], ends.far < ends.whole[1]
        spaced = self.spaced.expand_as(self.edges)
        return Bins(
            torch.cat(
                [spaced[:, :1].masked_fill(front, 0.0), spaced[:, 1:-1], spaced[:, -1:].masked_fill(back, 1.0)], 1
            ),
            torch.cat(
                [
                    torch.where(front, ends.near, self.edges[:, :1]),
                    self.edges[:, 1:-1],
                    torch.where(back, ends.far, self.edges[:, -1:]),
                ],
                1,
            ),
        )


@torch.no_grad()
def evenly(ends: Ends, samples: int, moved: Tensor | None) -> Bins:
    """Return evenly spaced samples, the same number in each segment.

    Args:
        moved: [n, 1 or samples + 1] random offsets of the edges from 0 to 1; None for no offsets.
    """
    spaced = torch.linspace(0.0, 1.0, samples + 1, device=ends.near.device)[None]
    if moved is not None:
        middles = (spaced[:, 1:] + spaced[:, :-1]) / 2.0
        upper, lower = torch.cat([middles, spaced[:, -1:]], 1), torch.cat([spaced[:, :1], middles], 1)
        spaced = lower + (upper - lower) * moved
    return Bins(spaced, ends.distances(spaced))


@torch.no_grad()
def by_weights(ends: Ends, before: Bins, weights: Tensor, samples: int, moved: Tensor | None) -> Bins:
    """Draw samples in each segment in proportion to the weights of the samples `before`.

    Args:
        weights: [n, S] of the samples before. moved: as of `evenly`.
    """
    weights = weights + _PADDING
    total = weights.sum(1, keepdim=True)
    lack = torch.relu(_LEAST - total)
    pdf = (weights + lack / weights.shape[1]) / (total + lack)
    cdf = running_sum(pdf).clamp_max(1.0)
    cdf = torch.cat([torch.zeros_like(cdf[:, :1]), cdf], 1)
    bins = samples + 1
    at = torch.linspace(0.0, 1.0 - (1.0 / bins), steps=bins, device=cdf.device)
    at = (at + 1.0 / (2 * bins) if moved is None else at + moved / bins).expand(len(cdf), bins).contiguous()
    place = torch.searchsorted(cdf, at, side="right")
    last = before.spaced.shape[1] - 1
    below, above = (place - 1).clamp(0, last), place.clamp(0, last)
    edges = before.spaced.expand(len(cdf), -1)
    (low, high), (first, second) = ((x.gather(1, below), x.gather(1, above)) for x in (cdf, edges))
    part = ((at - low) / (high - low)).nan_to_num(0).clip(0, 1)
    spaced = first + part * (second - first)
    return Bins(spaced, ends.distances(spaced))


def weights_of(bins: Bins, density: Tensor) -> Tensor:
    """Return the weights [n, S] of samples seen from a segment's begin, as nerfstudio's `RaySamples.get_weights` does.

    Args:
        density: [n, S], per unit of distance.
    """
    depth = optical_depth(density, bins.edges)
    before = torch.cat([torch.zeros_like(depth[:, :1]), running_sum(depth)[:, :-1]], 1)
    return ((1 - torch.exp(-depth)) * torch.exp(-before)).nan_to_num()
