"""Operators of the pixel legs in a step that reads nothing back."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.exchange.transport import Parts
from ns_multigpu.core.kernels import Drawn, Lists, Received, Rows
from ns_multigpu.core.types import Patch, View


class OwnedPixels(NamedTuple):
    """Patches that a rank owns, halos included, as a flat list of pixels.

    Attributes:
        color: [P, 3] without background, or [P, 4] with blended depth. alpha: [P].
        last: see `Drawn`; None if pixels were exchanged.
    """

    color: Tensor
    alpha: Tensor
    last: Tensor | None


class PixelOperators(ABC):
    """One rank's side of a pixel leg in a fused step. Every rank calls its methods in this order, once a step.

    Attributes:
        exchanged: True if pixels are exchanged between ranks.
        marks_stops: True if drawing marks stopped pixels by negative alphas, which `return_gradients` then handles.
    """

    exchanged = False
    marks_stops = False

    def layered(self, received: Received, rows: Rows) -> Received:
        """Return the rows with the indices of their cell images instead of their views'."""
        return received

    def clipped(self, lists: Lists, received: Received, plan: Plan, views: Sequence[View]) -> Lists:
        """Return the lists of this rank's patches, restricted to what is drawn here."""
        return lists

    def layer(self, patch: Patch, first_view: int) -> int:
        """Return a patch's image: one of the rows' views, counted from `first_view`, or a cell image."""
        return patch.view - first_view

    def split(self, plan: Plan) -> Sequence[Plan]:
        """Return the plan, or plans of successive views of it. The pixels of one are exchanged while the next is drawn,
        and their gradients while those of the next are propagated. The exchange of each ends before `return_gradients`
        of it begins, and that of the next ends later."""
        return [plan]

    @abstractmethod
    def exchange(self, drawn: Drawn, plan: Plan, views: Sequence[View]) -> Parts[OwnedPixels]:
        """Return the patches that this rank owns, from what it has drawn."""

    def live(self) -> Tensor:
        """Return this rank's `Feedback.LIVE` numbers, after `exchange`."""
        raise NotImplementedError("nothing is hidden where patches are whole")

    @abstractmethod
    def return_gradients(self, v_color: Tensor, v_alpha: Tensor) -> Parts[tuple[Tensor, Tensor]]:
        """Return the gradients of the drawn colours and coverage, from those [P, 3] and [P] of the owned patches, which
        are zero in halos."""


class WholePixelOperators(PixelOperators):
    """Operators for patches whose drawing rank is their owner."""

    def exchange(self, drawn: Drawn, plan: Plan, views: Sequence[View]) -> Parts[OwnedPixels]:
        yield from ()
        return OwnedPixels(drawn.color, drawn.alpha, drawn.last)

    def return_gradients(self, v_color: Tensor, v_alpha: Tensor) -> Parts[tuple[Tensor, Tensor]]:
        yield from ()
        return v_color, v_alpha
