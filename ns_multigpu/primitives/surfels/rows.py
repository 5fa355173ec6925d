"""Rows of 2D Gaussians, and how they and their gradients travel: each in two records, or two segments, of those that
rows of 3D Gaussians travel in (`cuda_ext.ops.row_exchange`, `cuda_ext.ops.row_wire`).

The first has the mean on the screen, the transform's first row in the place of a conic, opacity, colour, depth and
radii; the second the rest of the transform in the place of mean, conic and opacity, and the normal in that of colour.
Gradients lie alike; that of the depth is the second's first absolute one.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.row_exchange import RECORD_FLOATS, ArrivedRows, collect, pack, unpack
from cuda_ext.ops.row_wire import collect_wire, gradient_words, pack_gradients, pack_wire, row_words, unpack_wire
from ns_multigpu.core.row_wire import STAYS, RowWire, WireSegments

SURFEL_FLOATS = 2 * RECORD_FLOATS
"""Numbers of a record: the first, and then the second of the two."""
_SECOND = RECORD_FLOATS


class SurfelRows(NamedTuple):
    """See `Rows` and `cuda_ext.ops.surfels.SurfelProjection`; `features` [M, 3] are colours."""

    view_ids: Tensor
    point_ids: Tensor
    count: Tensor
    means2d: Tensor
    transforms: Tensor
    normals: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor
    radii: Tensor

    @property
    def conics(self) -> Tensor:
        """Without a bound: a splat's box alone says where it is."""
        return torch.zeros_like(self.normals)


class ArrivedSurfels(NamedTuple):
    """The same where they are drawn; see `Arrived`."""

    view_ids: Tensor
    means2d: Tensor
    transforms: Tensor
    normals: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor
    radii: Tensor
    owners: Tensor
    slots: Tensor


class SurfelGradients(NamedTuple):
    """Gradients of rows."""

    means2d: Tensor
    transforms: Tensor
    normals: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor


_Half = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _halves(rows: SurfelRows) -> tuple[_Half, _Half]:
    """Rows as two of 3D Gaussians: what `pack` and `pack_wire` take."""
    t = rows.transforms
    first = (rows.means2d, t[:, 0:3].contiguous(), rows.opacities, rows.features, rows.depths)
    second = (
        t[:, 3:5].contiguous(), t[:, 5:8].contiguous(), t[:, 8].contiguous(), rows.normals,
        torch.zeros_like(rows.depths),
    )  # fmt: skip
    return (rows.view_ids, *first, rows.radii), (rows.view_ids, *second, rows.radii)


def _whole(first: ArrivedRows, second: ArrivedRows) -> ArrivedSurfels:
    transforms = torch.cat([first.conics, second.means2d, second.conics, second.opacities[:, None]], dim=1)
    shape = (first.means2d, transforms, second.features, first.opacities, first.features, first.depths)
    return ArrivedSurfels(first.view_ids, *shape, first.radii, first.owners, first.slots)


def records_of(g: SurfelGradients) -> Tensor:
    """Gradients as records [M, SURFEL_FLOATS]."""
    nothing = torch.zeros(len(g.depths), 7, dtype=g.depths.dtype, device=g.depths.device)
    first = (g.means2d, g.transforms[:, 0:3], g.opacities[:, None], g.features, nothing)
    second = (g.transforms[:, 3:9], g.normals, nothing[:, :1], g.depths[:, None], nothing[:, :5])
    return torch.cat([*first, *second], dim=1)


def gradients_of(records: Tensor) -> SurfelGradients:
    """The inverse of `records_of`."""
    transforms = torch.cat([records[:, 2:5], records[:, _SECOND : _SECOND + 6]], dim=1)
    normals, depths = records[:, _SECOND + 6 : _SECOND + 9], records[:, _SECOND + 10]
    return SurfelGradients(records[:, 0:2], transforms, normals, records[:, 5], records[:, 6:9], depths)


def _lines(place: Tensor, capacity: int, half: int) -> Tensor:
    """Places of rows -> of one of their two records."""
    return torch.where((place >= 0) & (place < capacity), 2 * place + half, -1)


def pack_surfels(rows: SurfelRows, place: Tensor, segments: Tensor, capacity: int, first: int, end: int) -> None:
    """See `Kernels.pack`."""
    for half, parts in enumerate(_halves(rows)):
        pack(*parts, _lines(place, capacity, half), segments, 2 * capacity, first, end)


def unpack_surfels(records: Tensor, counts: Tensor, views: int) -> ArrivedSurfels:
    """See `Kernels.unpack`."""
    ranks, capacity = records.shape[:2]
    halves = records.view(ranks, capacity, 2, RECORD_FLOATS).unbind(2)
    return _whole(*(unpack(half.contiguous(), counts, views) for half in halves))


def collect_surfels(place: Tensor, count: Tensor, sources: Tensor, capacity: int) -> Tensor:
    """See `Kernels.collect`."""
    halves = (collect(_lines(place, capacity, half), count, sources, 2 * capacity) for half in (0, 1))
    return torch.cat(list(halves), dim=1)


@dataclass(frozen=True)
class SurfelRowWire(RowWire):
    """See `cuda_ext.ops.row_wire`; nothing is rounded.

    Attributes:
        slots: see `Kernels.wire`.
    """

    slots: bool

    @property
    def row_words(self) -> int:
        return 2 * self._words

    @property
    def gradient_words(self) -> int:
        return sum(gradient_words(half=False, absgrad=absgrad) for absgrad in (False, True))

    @property
    def _words(self) -> int:
        return row_words(half=False, slots=self.slots)

    def pack(self, rows: SurfelRows, place: Tensor, wire: Tensor, to: WireSegments, first: int, end: int) -> None:
        for part, half in zip(_halves(rows), (to, _behind(to, self._words)), strict=True):
            pack_wire(
                *part, place, wire, half.starts, half.capacities, half.rank, half=False, slots=self.slots, first=first,
                end=end,
            )  # fmt: skip

    def unpack(self, wire: Tensor, come: WireSegments, counts: Tensor, views: int) -> ArrivedSurfels:
        halves = (
            unpack_wire(wire, part.starts, part.capacities, counts, part.rank, views, half=False, slots=self.slots)
            for part in (come, _behind(come, self._words))
        )
        return _whole(*halves)

    def keep(self, rows: SurfelRows, place: Tensor, arrived: ArrivedSurfels, come: WireSegments, source: int) -> None:
        room, first = come.capacities[source], come.line(source)
        lines = torch.arange(len(place), device=place.device)
        # One more takes what does not stay, or has no room.
        found = torch.full((room + 1,), -1, dtype=torch.int64, device=place.device)
        found.scatter_(0, torch.where((place >= 0) & (place < room), place.long(), room), lines)
        found = found[:room]
        there, found = found >= 0, found.clamp(min=0)
        if len(place) == 0:
            return

        def put(to: Tensor, values: Any) -> None:
            part = to[first : first + room]
            part.copy_(torch.where(there.view(-1, *[1] * (to.dim() - 1)), values, part))

        for name in ("view_ids", *SurfelGradients._fields, "radii"):
            put(getattr(arrived, name), getattr(rows, name)[found])
        if self.slots:
            put(arrived.slots, found.int())

    def pack_gradients(self, records: Tensor, counts: Tensor, wire: Tensor, to: WireSegments) -> None:
        behind = gradient_words(half=False, absgrad=False)
        for k, part in enumerate((to, _behind(to, behind))):
            half = records[:, k * _SECOND : (k + 1) * _SECOND].contiguous()
            where = (half, counts, wire, part.starts, part.capacities, part.rank)
            pack_gradients(*where, half=False, absgrad=k == 1)

    def collect(self, place: Tensor, count: Tensor, wire: Tensor, come: WireSegments, own: Tensor) -> Tensor:
        behind = gradient_words(half=False, absgrad=False)
        halves: list[Tensor] = []
        for k, part in enumerate((come, _behind(come, behind))):
            half = own[:, k * _SECOND : (k + 1) * _SECOND].contiguous()
            where = (place, count, wire, part.starts, part.capacities, half, part.rank)
            halves.append(collect_wire(*where, half=False, absgrad=k == 1))
        return torch.cat(halves, dim=1)


def _behind(segments: WireSegments, words: int) -> WireSegments:
    """Where each segment goes on behind so many of its columns."""
    pairs = zip(segments.starts, segments.capacities, strict=True)
    return replace(segments, starts=tuple(s if s == STAYS else s + words * rows for s, rows in pairs))
