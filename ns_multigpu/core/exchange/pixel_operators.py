"""Operators of the pixel legs in a step that reads nothing back."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.exchange.transport import Parts
from ns_multigpu.core.kernels import Arrived, Drawn, Lists, Rows
from ns_multigpu.core.types import Patch, View


class Settled(NamedTuple):
    """The patches that a rank owns, halos included, a pixel after the other.

    Attributes:
        color: [P, 3] without background. alpha: [P].
        last: see `Drawn`; None where what was drawn are other pixels.
    """

    color: Tensor
    alpha: Tensor
    last: Tensor | None


class PixelOperators(ABC):
    """One rank's side of a pixel leg. Every rank calls its methods in this order, once a step.

    Attributes:
        exchanged: whether pixels cross ranks.
        marks_stops: whether what is drawn has alphas below 0 where drawing stopped; `bring_back` minds it.
    """

    exchanged = False
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
        """What this rank tells of `Feedback.LIVE`, once patches are settled."""
        raise NotImplementedError("nothing is hidden where patches are whole")

    @abstractmethod
    def bring_back(self, v_color: Tensor, v_alpha: Tensor) -> Parts[tuple[Tensor, Tensor]]:
        """Gradients [P, 3] and [P] of the patches that it owns, zero in halos -> of what it has drawn, by colour and by
        what is covered."""


class WholePixelOperators(PixelOperators):
    """Who draws a patch owns it."""

    def settle(self, drawn: Drawn, plan: Plan, views: Sequence[View]) -> Parts[Settled]:
        yield from ()
        return Settled(drawn.color, drawn.alpha, drawn.last)

    def bring_back(self, v_color: Tensor, v_alpha: Tensor) -> Parts[tuple[Tensor, Tensor]]:
        yield from ()
        return v_color, v_alpha
