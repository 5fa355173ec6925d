"""Who sends which pixels to whom where views are drawn cell by cell: direct send, as sort-last renderers do.

A cell's drawing of a view is cut by the patches that ranks own, halos included, into pieces. Each goes to the patch's
owner, and the gradient of what it owns comes back. Everything follows from the plan: nobody asks anybody.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.types import View

Rectangle = tuple[int, int, int, int]
Sizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """A rectangle of pixels on its way from who drew it to who owns a patch that needs it.

    Attributes:
        source: (rank, position among what it draws); None for a rectangle that nobody draws (`Plan.hidden`).
        target: (rank, position among what it owns).
        rectangle: x0, y0, x1, y1, pixels of the view; never empty.
        own: whether these are pixels of the patch itself; else they lie in its halo.
        cell: whose layer it is.
    """

    source: tuple[int, int] | None
    target: tuple[int, int]
    rectangle: Rectangle
    own: bool
    cell: int

    @property
    def pixels(self) -> int:
        """How many it has."""
        x0, y0, x1, y1 = self.rectangle
        return (x1 - x0) * (y1 - y0)


def find_pieces(plan: Plan, views: Sequence[View]) -> list[Piece]:
    """All pieces of a plan: by target, of each front to back; the same list on every rank."""
    drawn: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, patches in enumerate(plan.drawn):
        for k, p in enumerate(patches):
            drawn.setdefault((p.view, p.cell), []).append((rank, k))
    hidden: dict[tuple[int, int], list[Rectangle]] = {}
    for p in plan.hidden:
        hidden.setdefault((p.view, p.cell), []).append((p.x0, p.y0, p.x1, p.y1))
    pieces: list[Piece] = []
    for rank, patches in enumerate(plan.owned):
        for k, patch in enumerate(patches):
            own, wide = (patch.x0, patch.y0, patch.x1, patch.y1), patch.rendered(views[patch.view])
            for cell in plan.order[patch.view]:
                for source in drawn.get((patch.view, cell), []):
                    seen = plan.drawn[source[0]][source[1]].rendered(views[patch.view])
                    for rectangle, inside in _parts(wide, own):
                        both = _both(rectangle, seen)
                        if both is not None:
                            pieces.append(Piece(source, (rank, k), both, inside, cell))
                for dark in hidden.get((patch.view, cell), ()):
                    both = _both(own, dark)
                    if both is not None:
                        pieces.append(Piece(None, (rank, k), both, True, cell))
    return pieces


def _both(a: Rectangle, b: Rectangle) -> Rectangle | None:
    x0, y0, x1, y1 = max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])
    return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None


def _parts(wide: Rectangle, own: Rectangle) -> Iterator[tuple[Rectangle, bool]]:
    """A patch's own rectangle, and what is around it, in up to four."""
    yield own, True
    (x0, y0, x1, y1), (left, top, right, bottom) = wide, own
    for around in ((x0, y0, x1, top), (x0, bottom, x1, y1), (x0, top, left, bottom), (right, top, x1, bottom)):
        yield around, False


@dataclass(frozen=True)
class Routes:
    """One rank's part of a plan's pieces, as buffers and operators take it. Numbers are of pixels.

    What is sent lies in a buffer by target, what arrives in another by source; a rank's own comes last in the latter.
    Gradients go the same way back, of pieces that owners own alone.

    Attributes:
        send, receive: for, and from, each rank; 0 for this one. kept: of this rank's own pieces.
        send_back, receive_back, kept_back: the same of gradients, which are sent by who has received.
        leaving, staying: 6 ints a piece that this rank drew, for others and for itself: the first pixel among what is
            drawn, the width of that patch, the piece's width and height, its first pixel in what is sent (or of what
            stays), its first pixel among gradients that come back (that stay), or -1 for a halo's.
        layers: 7 ints a piece that arrives here, by patch, front to back: the patch, x0, y0, x1, y1 there, the first
            pixel in what arrives, the first pixel of its gradients or -1.
        watched: 6 ints a piece of a layer that is the patch's own, drawn or not: its view and cell as one number
            (view * cells + cell), its first pixel in what arrives, x0 and y0 in the view, its width and height. Those
            that nobody draws come last in what arrives: `dark` pixels of them, that are nothing.
        sizes: width and height of each rendered patch that this rank owns.
        drawn: pixels that this rank draws.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    kept: int
    send_back: tuple[int, ...]
    receive_back: tuple[int, ...]
    kept_back: int
    leaving: tuple[int, ...]
    staying: tuple[int, ...]
    layers: tuple[int, ...]
    watched: tuple[int, ...]
    dark: int
    sizes: tuple[int, ...]
    drawn: int

    @property
    def arrived(self) -> int:
        """Pixels that this rank composites, its own included, and not those that nobody draws."""
        return sum(self.receive) + self.kept

    @property
    def returned(self) -> int:
        """Of these, those whose gradients are sent back, or stay."""
        return sum(self.send_back) + self.kept_back

    @property
    def owned(self) -> int:
        """Pixels of the patches that this rank owns, halos included."""
        return sum(w * h for w, h in zip(self.sizes[::2], self.sizes[1::2], strict=True))


def routes_of(plan: Plan, views: Sequence[View], rank: int) -> Routes:
    """The routes of a plan for views of these sizes."""
    return _routes(plan, tuple((view.width, view.height) for view in views), rank)


@lru_cache(maxsize=64)
def _routes(plan: Plan, sizes: Sizes, rank: int) -> Routes:
    nothing = torch.empty(0)  # nobody asks where the cameras are
    views = [View(nothing, nothing, width, height) for width, height in sizes]
    pieces, ranks = find_pieces(plan, views), len(plan.drawn)
    sent = [(p.source[0], p) for p in pieces if p.source is not None]
    out = sorted(((p.target[0], p) for s, p in sent if s == rank != p.target[0]), key=lambda one: one[0])
    into = sorted(((s, p) for s, p in sent if p.target[0] == rank != s), key=lambda one: one[0])
    kept = [p for s, p in sent if s == p.target[0] == rank]
    dark = [p for p in pieces if p.source is None and p.target[0] == rank]
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

    arriving = [*(p for _, p in into), *kept]
    places = dict(zip([*arriving, *dark], _places([*arriving, *dark]), strict=True))
    cells = max((len(order) for order in plan.order), default=1)
    layers: list[int] = []
    watched: list[int] = []
    for piece in pieces:
        if piece.target[0] == rank:
            patch = plan.owned[rank][piece.target[1]]
            left, top, _, _ = patch.rendered(views[patch.view])
            x0, y0, x1, y1 = piece.rectangle
            first, back = places[piece]
            back = back if piece.source is not None else -1
            layers += [piece.target[1], x0 - left, y0 - top, x1 - left, y1 - top, first, back]
            if piece.own:
                watched += [patch.view * cells + piece.cell, first, x0, y0, x1 - x0, y1 - y0]
    wide = [patch.rendered(views[patch.view]) for patch in plan.owned[rank]]
    sizes_ = tuple(n for x0, y0, x1, y1 in wide for n in (x1 - x0, y1 - y0))
    return Routes(
        send, receive, sum(p.pixels for p in kept), receive_own, send_own, sum(p.pixels for p in kept if p.own),
        taken([p for _, p in out]), taken(kept), tuple(layers), tuple(watched), sum(p.pixels for p in dark), sizes_, at,
    )  # fmt: skip


def _by_rank(pieces: Sequence[tuple[int, Piece]], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pixels by rank, in all and of those that owners own."""
    everything, own = [0] * ranks, [0] * ranks
    for rank, piece in pieces:
        everything[rank] += piece.pixels
        own[rank] += piece.pixels if piece.own else 0
    return tuple(everything), tuple(own)


def _places(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Where each piece begins among all of these, and where its gradients do: -1 for a halo's."""
    places: list[tuple[int, int]] = []
    first = back = 0
    for piece in pieces:
        places.append((first, back if piece.own else -1))
        first += piece.pixels
        back += piece.pixels if piece.own else 0
    return places
