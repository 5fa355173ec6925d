# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The pixel legs of a step that reads nothing back: see `legs` and `composite` for their other face."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.pieces import composite_pieces, composite_pieces_backward, gather_pieces, scatter_pieces
from ns_multigpu.core.collectives import all_to_all_parts
from ns_multigpu.core.composite import CompositePixels, PixelWire, live_numbers
from ns_multigpu.core.crossing import clipped
from ns_multigpu.core.kernels import Arrived, Drawn, Lists, Rows
from ns_multigpu.core.legs import PixelLeg, WholePixels
from ns_multigpu.core.pieces import Routes, routes_of
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.transports import Collective, Parts
from ns_multigpu.core.types import Patch, View
from ns_multigpu.core.world import World


class Settled(NamedTuple):
    """The patches that a rank owns, halos included, a pixel after the other.

    Attributes:
        color: [P, 3] without background. alpha: [P].
        last: see `Drawn`; None where what was drawn are other pixels.
    """

    color: Tensor
    alpha: Tensor
    last: Tensor | None


class PixelCarrier(ABC):
    """One rank's side of a pixel leg. Every rank calls its methods in this order, once a step.

    Attributes:
        marks_stops: whether what is drawn has alphas below 0 where drawing stopped; `bring_back` minds it.
    """

    marks_stops = False

    def layered(self, arrived: Arrived, rows: Rows) -> Arrived:
        """Rows with the numbers of their layers in the place of their views'."""
        return arrived

    def clipped(self, lists: Lists, arrived: Arrived, plan: Plan, views: Sequence[View]) -> Lists:
        """Of the lists of what this rank draws, what is drawn here."""
        return lists

    def layer(self, patch: Patch, first_view: int) -> int:
        """The layer that a patch is drawn of: one of the rows' views, counted from `first_view`, or a cell of one."""
        return patch.view - first_view

    @abstractmethod
    def settle(self, drawn: Drawn, plan: Plan, views: Sequence[View]) -> Parts[Settled]:
        """What this rank has drawn -> the patches that it owns."""

    def live(self) -> Tensor:
        """What this rank tells of `Learns.LIVE`, once patches are settled."""
        raise NotImplementedError("nothing is hidden where patches are whole")

    @abstractmethod
    def bring_back(self, v_color: Tensor, v_alpha: Tensor) -> Parts[tuple[Tensor, Tensor]]:
        """Gradients [P, 3] and [P] of the patches that it owns, zero in halos -> of what it has drawn, by colour and by
        what is covered."""


class PixelsStay(PixelCarrier):
    """Who draws a patch owns it."""

    def settle(self, drawn: Drawn, plan: Plan, views: Sequence[View]) -> Parts[Settled]:
        yield from ()
        return Settled(drawn.color, drawn.alpha, drawn.last)

    def bring_back(self, v_color: Tensor, v_alpha: Tensor) -> Parts[tuple[Tensor, Tensor]]:
        yield from ()
        return v_color, v_alpha


class PixelsTravel(PixelCarrier):
    """Layers go to the owners of their pixels, and gradients of what these own come back. The plan says how many."""

    marks_stops = True

    def __init__(self, leg: CompositePixels, world: World) -> None:
        self._cells, self._half, self._crossing, self._world = leg.cells, leg.half, leg.crossing, world
        self._now: tuple[Routes, PixelWire, Tensor, Tensor, Tensor] | None = None
        self._live = torch.zeros(0)
        self._watches = leg.told is not None

    def layered(self, arrived: Arrived, rows: Rows) -> Arrived:
        return arrived if self._crossing is not None else self._cells.layered(arrived, rows.point_ids)

    def layer(self, patch: Patch, first_view: int) -> int:
        assert first_view == 0, "all of the batch's views are splatted"
        return patch.view if self._crossing is not None else self._cells.layer(patch)

    def clipped(self, lists: Lists, arrived: Arrived, plan: Plan, views: Sequence[View]) -> Lists:
        if self._crossing is None:
            return lists
        return clipped(self._crossing, lists, arrived, plan, views, self._world.rank)

    def settle(self, drawn: Drawn, plan: Plan, views: Sequence[View]) -> Parts[Settled]:
        routes, color = routes_of(plan, views, self._world.rank), drawn.color
        wire = PixelWire.of(views, half=self._half)
        width = color.shape[1] + 1
        out = color.new_empty(sum(routes.send), width)
        received = color.new_empty(routes.arrived + routes.dark, width)
        received[routes.arrived :].zero_()
        others = sum(routes.receive)
        gather_pieces(color, drawn.alpha, routes.leaving, out)
        gather_pieces(color, drawn.alpha, routes.staying, received[others : routes.arrived])
        arrived = yield from self._exchange(wire.pack(out), routes.receive, routes.send)
        received[:others].copy_(arrived)
        settled, alpha, before = composite_pieces(received, routes.layers, routes.sizes)
        self._now = routes, wire, received, before, drawn.alpha
        if self._watches:
            self._live = live_numbers(before, routes, plan)
        return Settled(settled, alpha, None)

    def live(self) -> Tensor:
        return self._live

    def bring_back(self, v_color: Tensor, v_alpha: Tensor) -> Parts[tuple[Tensor, Tensor]]:
        assert self._now is not None
        routes, wire, received, before, alpha = self._now
        self._now = None
        gradients = composite_pieces_backward(
            received, before, v_color, v_alpha, routes.layers, routes.sizes, routes.returned
        )
        del received, before
        others = sum(routes.send_back)
        leaving = wire.pack_gradients(gradients[:others])
        back = yield from self._exchange(leaving, routes.receive_back, routes.send_back)
        back = wire.unpack_gradients(back, gradients)
        v_drawn = v_color.new_zeros(routes.drawn, v_color.shape[1]), v_alpha.new_zeros(routes.drawn)
        scatter_pieces(back, routes.leaving, *v_drawn)
        scatter_pieces(gradients[others:], routes.staying, *v_drawn)
        # Of what stopped the sign was a mark: drawing takes the gradient by what is covered.
        return v_drawn[0], torch.where(alpha < 0, -v_drawn[1], v_drawn[1])

    def _exchange(self, out: Tensor, receive: Sequence[int], send: Sequence[int]) -> Parts[Tensor]:
        """Pixels for each other rank -> those of each, one rank's behind the other's."""
        width = out.shape[1]
        into = out.new_empty(sum(receive), width)
        if self._world.size > 1:
            sizes = [width * pixels for pixels in receive], [width * pixels for pixels in send]
            yield Collective(lambda: all_to_all_parts(into.view(-1), out.view(-1), *sizes, self._world))
        return into


def carrier_of(leg: PixelLeg, world: World) -> PixelCarrier | None:
    """The carrier of a leg's pixels; None where there is none. A leg's own type counts: a class derived from it may do
    something else."""
    if type(leg) is CompositePixels:
        return PixelsTravel(leg, world)
    return PixelsStay() if type(leg) is WholePixels else None
