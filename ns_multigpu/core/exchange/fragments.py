"""Fragments of views that are drawn cell by cell: direct send, as in sort-last renderers.

A cell image is cut into fragments by the patches that ranks own, halos included. Each is sent to the patch's owner, and
the gradient of its owned pixels is returned. Everything follows from the plan without communication.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ns_multigpu.core.assign.image_part import Rectangle, area, overlap
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.types import TILE, Sizes, View, sizes_of

BANDS = 16
"""Bands of a view at most, each of which has its own box of a cell's visible pixels (`Feedback.LIVE`)."""


def band_height(height: int) -> int:
    """Return the height in pixels of all bands but the last of a view: whole rows of tiles."""
    return -(-height // (TILE * BANDS)) * TILE


@dataclass(frozen=True)
class Piece:
    """Rectangle of pixels sent from the rank that drew it to the owner of a patch that needs it.

    Attributes:
        source: (rank, position among its drawn patches); None for a rectangle that no rank draws (`Plan.hidden`).
        target: (rank, position among its owned patches).
        rectangle: x0, y0, x1, y1, pixels of the view; never empty.
        own: True for pixels of the patch itself; False for its halo.
        cell: of its cell image.
    """

    source: tuple[int, int] | None
    target: tuple[int, int]
    rectangle: Rectangle
    own: bool
    cell: int

    @property
    def pixels(self) -> int:
        """Number of its pixels."""
        return area(self.rectangle)


def find_fragments(plan: Plan, views: Sequence[View], to: int | None = None) -> list[Piece]:
    """Return the fragments of a plan: by target, of each front to back; the same list on every rank.

    Args:
        to: a rank, to return its own fragments alone: those that it draws or owns.
    """
    drawn: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, patches in enumerate(plan.drawn):
        for k, p in enumerate(patches):
            drawn.setdefault((p.view, p.cell), []).append((rank, k))
    hidden: dict[tuple[int, int], list[Rectangle]] = {}
    for p in plan.hidden:
        hidden.setdefault((p.view, p.cell), []).append((p.x0, p.y0, p.x1, p.y1))
    fragments: list[Piece] = []
    for rank, patches in enumerate(plan.owned):
        for k, patch in enumerate(patches):
            own, wide = (patch.x0, patch.y0, patch.x1, patch.y1), patch.rendered(views[patch.view])
            for cell in plan.order[patch.view]:
                for source in drawn.get((patch.view, cell), []):
                    if to is not None and to not in (rank, source[0]):
                        continue
                    seen = plan.drawn[source[0]][source[1]].rendered(views[patch.view])
                    for rectangle, inside in _parts(wide, own):
                        both = overlap(rectangle, seen)
                        if both is not None:
                            fragments.append(Piece(source, (rank, k), both, inside, cell))
                for dark in hidden.get((patch.view, cell), ()) if to in (None, rank) else ():
                    both = overlap(own, dark)
                    if both is not None:
                        fragments.append(Piece(None, (rank, k), both, True, cell))
    return fragments


def _parts(wide: Rectangle, own: Rectangle) -> Iterator[tuple[Rectangle, bool]]:
    """Yield a patch's own rectangle, and up to four rectangles of its halo."""
    yield own, True
    (x0, y0, x1, y1), (left, top, right, bottom) = wide, own
    for around in ((x0, y0, x1, top), (x0, bottom, x1, y1), (x0, top, left, bottom), (right, top, x1, bottom)):
        yield around, False


@dataclass(frozen=True)
class Routes:
    """One rank's fragments of a plan, as buffers and operators take them. Numbers are of pixels.

    The send buffer is ordered by target, the receive buffer by source; a rank's own fragments are last in the latter.
    Gradients return the same way, for owned pixels only.

    Attributes:
        send, receive: to, and from, each rank; 0 for this one. kept: of this rank's local fragments.
        send_back, receive_back, kept_back: the same of gradients, which receivers send.
        sent_fragments, local_fragments: 6 ints per fragment that this rank drew, for others and for itself. These are
            the first drawn pixel, the width of that patch, the fragment's width and height, its first pixel in the
            send buffer (or among local ones), and its first pixel among returned (or local) gradients, -1 for a halo's.
        layers: 7 ints per received fragment, by patch, front to back: the patch, x0, y0, x1, y1 there, the first pixel
            in the receive buffer, the first pixel of its gradients or -1.
        watched: 6 ints per fragment of the patch's own pixels, drawn or not, and band of the view: its view, cell and
            band as one number ((view * cells + cell) * `BANDS` + band), its first pixel in the receive buffer, x0 and
            y0 in the view, its width and height.
        dark: empty pixels that no rank draws, last in the receive buffer.
        sizes: width and height of each rendered patch that this rank owns.
        drawn: pixels that this rank draws.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    kept: int
    send_back: tuple[int, ...]
    receive_back: tuple[int, ...]
    kept_back: int
    sent_fragments: tuple[int, ...]
    local_fragments: tuple[int, ...]
    layers: tuple[int, ...]
    watched: tuple[int, ...]
    dark: int
    sizes: tuple[int, ...]
    drawn: int

    @property
    def received(self) -> int:
        """Pixels that this rank composites, its own included, without those that no rank draws."""
        return sum(self.receive) + self.kept

    @property
    def returned(self) -> int:
        """Number of these whose gradients are returned, or local."""
        return sum(self.send_back) + self.kept_back

    @property
    def owned(self) -> int:
        """Pixels of the patches that this rank owns, halos included."""
        return sum(w * h for w, h in zip(self.sizes[::2], self.sizes[1::2], strict=True))


def routes_of(plan: Plan, views: Sequence[View], rank: int) -> Routes:
    """Return the routes of a plan for views of these sizes."""
    return _routes(plan, sizes_of(views), rank)


@lru_cache(maxsize=256)
def _routes(plan: Plan, sizes: Sizes, rank: int) -> Routes:
    nothing = torch.empty(0)  # camera poses do not matter
    views = [View(nothing, nothing, width, height) for width, height in sizes]
    fragments, ranks = find_fragments(plan, views, rank), len(plan.drawn)
    sent = [(p.source[0], p) for p in fragments if p.source is not None]
    out = sorted(((p.target[0], p) for s, p in sent if s == rank != p.target[0]), key=lambda one: one[0])
    into = sorted(((s, p) for s, p in sent if p.target[0] == rank != s), key=lambda one: one[0])
    kept = [p for s, p in sent if s == p.target[0] == rank]
    dark = [p for p in fragments if p.source is None and p.target[0] == rank]
    send, send_own = _by_rank(out, ranks)
    receive, receive_own = _by_rank(into, ranks)
    starts, at = [0], 0
    for patch in plan.drawn[rank]:
        x0, y0, x1, y1 = patch.rendered(views[patch.view])
        at += (x1 - x0) * (y1 - y0)
        starts.append(at)

    def taken(some: Sequence[Piece]) -> tuple[int, ...]:
        numbers: list[int] = []
        for piece, (first, back) in zip(some, _places(some), strict=True):
            assert piece.source is not None
            patch = plan.drawn[rank][piece.source[1]]
            left, top, right, _ = patch.rendered(views[patch.view])
            x0, y0, x1, y1 = piece.rectangle
            corner = starts[piece.source[1]] + (y0 - top) * (right - left) + x0 - left
            numbers += [corner, right - left, x1 - x0, y1 - y0, first, back]
        return tuple(numbers)

    received = [*(p for _, p in into), *kept]
    places = dict(zip([*received, *dark], _places([*received, *dark]), strict=True))
    cells = max((len(order) for order in plan.order), default=1)
    layers: list[int] = []
    watched: list[int] = []
    for piece in fragments:
        if piece.target[0] == rank:
            patch = plan.owned[rank][piece.target[1]]
            left, top, _, _ = patch.rendered(views[patch.view])
            x0, y0, x1, y1 = piece.rectangle
            first, back = places[piece]
            back = back if piece.source is not None else -1
            layers += [piece.target[1], x0 - left, y0 - top, x1 - left, y1 - top, first, back]
            if piece.own:
                high = band_height(views[patch.view].height)
                for band in range(y0 // high, -(-y1 // high)):
                    top, bottom = max(y0, band * high), min(y1, (band + 1) * high)
                    slot = (patch.view * cells + piece.cell) * BANDS + band
                    watched += [slot, first + (top - y0) * (x1 - x0), x0, top, x1 - x0, bottom - top]
    wide = [patch.rendered(views[patch.view]) for patch in plan.owned[rank]]
    sizes_ = tuple(n for x0, y0, x1, y1 in wide for n in (x1 - x0, y1 - y0))
    return Routes(
        send, receive, sum(p.pixels for p in kept), receive_own, send_own, sum(p.pixels for p in kept if p.own),
        taken([p for _, p in out]), taken(kept), tuple(layers), tuple(watched), sum(p.pixels for p in dark), sizes_, at,
    )  # fmt: skip


def _by_rank(fragments: Sequence[tuple[int, Piece]], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return pixels by rank, in all and of the patches' own."""
    everything, own = [0] * ranks, [0] * ranks
    for rank, piece in fragments:
        everything[rank] += piece.pixels
        own[rank] += piece.pixels if piece.own else 0
    return tuple(everything), tuple(own)


def _places(fragments: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return each fragment's first pixel among all of these, and that of its gradients: -1 for a halo's."""
    places: list[tuple[int, int]] = []
    first = back = 0
    for piece in fragments:
        places.append((first, back if piece.own else -1))
        first += piece.pixels
        back += piece.pixels if piece.own else 0
    return places
