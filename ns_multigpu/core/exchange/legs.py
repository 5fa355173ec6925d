"""Legs of a step: the exchanges between points and pixels, forward and backward.

A strategy names one of each: rows (splats) local or exchanged, pixels drawn by their owner or composited, gradients
returned to a point's owner or summed over replicas. Each has a differentiable form, and `operators`, which read nothing
back, for fused steps. A leg without operators gives its `unsupported_reason`.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, cast

from torch import Tensor

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.buckets import GradientBuckets
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.halo import Halos, WholeGradients
from ns_multigpu.core.exchange.pair_capacities import Pairs
from ns_multigpu.core.exchange.pixel_operators import PixelOperators, WholePixelOperators
from ns_multigpu.core.exchange.replicated_rows import LockstepRows, PeerReplicas, ReplicatedRows
from ns_multigpu.core.exchange.row_operators import RowOperators
from ns_multigpu.core.exchange.transport import Transport
from ns_multigpu.core.kernels import Kernels
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.types import Pixels, Points, Rendering, Splats, View


class Leg(ABC):
    """Exchange in one stage of a step."""

    carries: ClassVar[str]
    """Name of what it exchanges, for messages."""

    @property
    def unsupported_reason(self) -> str | None:
        """Reason why a fused step cannot run this leg; None if it can.

        A class has operators if it defines them itself: one that is derived from it may exchange something else.
        """
        if "operators" in vars(type(self)):
            return None
        return f"{type(self).__name__} has no operators that exchange {self.carries} in fused steps"


class RowLeg(Leg):
    """Exchange of rows: sends splats to the ranks that draw them, and returns their gradients in backward."""

    carries = "rows"
    can_cancel: ClassVar[bool] = False
    """True if a rank that fails in rendering or backward can cancel the step: the other ranks do not hang."""
    is_exchanged: ClassVar[bool]
    """True if rows are sent to ranks other than their points' owner."""
    hierarchical: bool | None = False
    """True if a row is sent once to each other machine and forwarded there (see `Hierarchy`). None: in fused steps, if
    the ranks of each machine share peer memory."""
    half: bool = False
    """True to round what collectives send in training to float16 where possible (`RowWire`, `ColumnWire`); with
    `hierarchical` between machines only."""
    slots: bool = False
    """True if fused steps send a row's line with it, for lists sorted over all ranks (`SortedLists`)."""

    def operators(self) -> RowOperators:
        """Return the operators that route rows.

        Raises:
            NotImplementedError: the leg has none; see `unsupported_reason`.
        """
        raise NotImplementedError(self.unsupported_reason)

    @abstractmethod
    def exchange(self, own: Splats, points: Points, views: Sequence[View], plan: Plan, world: World) -> Splats:
        """Return the splats of this rank's patches, from those of its points (`own`, of `points`)."""


class LocalRows(RowLeg):
    """Row leg of ranks that draw their own points."""

    can_cancel = True
    is_exchanged = False

    def operators(self) -> RowOperators:
        return RowOperators()

    def exchange(self, own: Splats, points: Points, views: Sequence[View], plan: Plan, world: World) -> Splats:
        return own


class PixelLeg(Leg):
    """Exchange of pixels: computes a patch's pixels at their owner, from the pixels that ranks have drawn."""

    carries = "pixels"
    can_cancel: ClassVar[bool] = True
    """As `RowLeg`'s."""
    fast_links: bool = False
    """As `Assignment`'s."""

    @property
    def whole(self) -> bool:
        """True if a rank's drawing of a patch is complete: on one rank, equal to the primitive's rendering."""
        return True

    def operators(self, world: World) -> PixelOperators:
        """Return the operators that exchange pixels.

        Raises:
            NotImplementedError: the leg has none; see `unsupported_reason`.
        """
        raise NotImplementedError(self.unsupported_reason)

    def prepare(self, pixels: int, world: World) -> None:
        """Allocate memory for so many pixels that a rank receives from the other ranks; 0: collectives exchange them.
        Collective, before `operators`. Does nothing where none are exchanged."""
        return

    def written_bytes(self, plan: Plan, views: Sequence[View], world: World) -> int:
        """Return the bytes that this rank writes into other ranks' memory in a fused step of a plan."""
        return 0

    def draw(
        self, primitive: Primitive, splats: Splats, views: Sequence[View], plan: Plan, world: World
    ) -> list[Pixels]:
        """Draw this rank's patches of the plan from the splats of `RowLeg.exchange`."""
        return primitive.render(splats, plan.drawn[world.rank], views)

    @abstractmethod
    def exchange(
        self, rendering: Rendering, splats: Splats, views: Sequence[View], plan: Plan, world: World
    ) -> Rendering:
        """Return the patches that this rank owns, from what it has drawn.

        Args:
            rendering: this rank's drawing, and the splats of its points.
            splats: the drawn splats: `RowLeg.exchange`'s.
            views, plan, world: as there.
        """


class WholePixels(PixelLeg):
    """Pixel leg of patches drawn completely by their owner.

    Only the gradients of halo pixels are exchanged, if there are halos: a densifier that sums magnitudes (AbsGS) needs
    a pixel's complete gradient first (see `halo`).
    """

    def operators(self, world: World) -> PixelOperators:
        return WholePixelOperators()

    def exchange(
        self, rendering: Rendering, splats: Splats, views: Sequence[View], plan: Plan, world: World
    ) -> Rendering:
        own = rendering.splats
        if splats is own and not any(patch.halo for patches in plan.drawn for patch in patches):
            return rendering
        outputs = [
            [t for t in (pixels.color, pixels.alpha, pixels.depth, *pixels.extra.values()) if t is not None]
            for pixels in rendering.pixels
        ]
        widths = [tensor.shape[-1] for tensor in outputs[0]] if outputs else []
        flat = [tensor for tensors in outputs for tensor in tensors]
        halos = Halos.of(plan, views, world.rank)
        anchor = next(row for row in splats.rows.values() if row.is_floating_point())
        named = [name for name, row in own.rows.items() if row.is_floating_point()]
        tied = cast(
            tuple[Tensor, ...],
            WholeGradients.apply(halos, widths, world, anchor, *flat, *(own.rows[name] for name in named)),
        )
        pixels: list[Pixels] = []
        for one in rendering.pixels:
            color, alpha, *rest = tied[len(pixels) * len(widths) :][: len(widths)]
            depth = None if one.depth is None else rest.pop(0)
            pixels.append(
                replace(one, color=color, alpha=alpha, depth=depth, extra=dict(zip(one.extra, rest, strict=True)))
            )
        rows = {**own.rows, **dict(zip(named, tied[len(flat) :], strict=True))}
        return Rendering(pixels, replace(own, rows=rows))


class GradientLeg(Leg):
    """Exchange of gradients: completes those of the parameters, around the backward pass."""

    carries = "gradients"
    can_cancel: ClassVar[bool] = False
    """Same as `RowLeg`'s; see `cancel`."""
    summed: ClassVar[bool]
    """True if every rank has all points, and gradients are summed over ranks."""

    def operators(
        self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int, *, peer: bool
    ) -> Transport:
        """Return the transport of gradients over several ranks with local rows.

        Args:
            world, kernels, rows, capacity, words: see `Transport`.
            peer: True if all ranks share peer memory.

        Raises:
            NotImplementedError: the leg has none; see `unsupported_reason`.
        """
        raise NotImplementedError(self.unsupported_reason)

    def render_begins(self, points: Points) -> None:
        """Receive this rank's points, before they are rendered."""
        return

    @abstractmethod
    def begin_backward(self, params: Iterable[Tensor]) -> None:
        """Prepare backward with every parameter that an optimizer updates, in the model's order."""

    @abstractmethod
    def end_backward(self) -> None:
        """Finish after backward, before the optimizers' steps: all gradients are final on return."""

    def cancel(self, params: Iterable[Tensor]) -> None:
        """Take part in the pending collectives of a failed rank's rendering and backward, so that the other ranks do
        not hang. All ranks must then discard the step's gradients.

        Args:
            params: as `begin_backward`'s.
        """
        return


class SummedGradients(GradientLeg):
    """Gradient leg of replicas: sums gradients in large buckets that overlap with backward."""

    can_cancel = True
    summed = True

    def __init__(self, world: World) -> None:
        self._buckets = GradientBuckets(world)

    def operators(
        self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int, *, peer: bool
    ) -> Transport:
        return (PeerReplicas if peer else ReplicatedRows)(world, kernels, rows, capacity, words)

    def begin_backward(self, params: Iterable[Tensor]) -> None:
        self._buckets.watch(list(params))

    def end_backward(self) -> None:
        self._buckets.finish()

    def cancel(self, params: Iterable[Tensor]) -> None:
        self._buckets.finish_unready(list(params))


class GradientsToOwner(GradientLeg):
    """Gradient leg of sharded points: complete at the owner once rows' gradients are returned. Other parameters (of
    camera poses, say) are replicated, and their gradients summed."""

    can_cancel = True
    summed = False

    def __init__(self, world: World) -> None:
        self._buckets = GradientBuckets(world)
        self._points: list[weakref.ref[Tensor]] = []
        self._replicated: list[Tensor] = []

    def operators(
        self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int, *, peer: bool
    ) -> Transport:
        return LockstepRows(world, kernels, rows, capacity, words)

    def render_begins(self, points: Points) -> None:
        # Weakly: densification is about to replace them, and must not find the old ones kept.
        self._points = [weakref.ref(param) for param in points.params.values()]

    def begin_backward(self, params: Iterable[Tensor]) -> None:
        points = [ref() for ref in self._points]
        self._replicated = [param for param in params if not any(param is one for one in points)]

    def end_backward(self) -> None:
        # Not while backward runs: the sums would meet the exchange of gradients in an order that differs by rank.
        self._buckets.watch(self._replicated)
        self._buckets.finish()
        self._replicated = []
