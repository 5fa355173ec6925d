"""The legs of a step: what crosses the wire on the way from points to pixels, and back.

A strategy names one of each kind: rows (splats) that stay or travel, pixels that are whole where they are drawn or not,
gradients that go to a point's owner or are summed over replicas. Each has two faces: a differentiable one, and
`operators` for steps that read nothing back. A leg without operators gives its `unsupported_reason`.
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
from ns_multigpu.core.exchange.replicated_rows import KeptRows, PeerReplicas, ReplicatedRows
from ns_multigpu.core.exchange.row_operators import RowOperators
from ns_multigpu.core.exchange.transport import Transport
from ns_multigpu.core.kernels import Kernels
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.types import Pixels, Points, Rendering, Splats, View


class Leg(ABC):
    """Exchange on one stretch of a step."""

    carries: ClassVar[str]
    """Name of what it exchanges, for messages."""

    @property
    def unsupported_reason(self) -> str | None:
        """Reason why a fused step cannot run this leg; None if it can.

        A class has operators if it defines them itself: one that is derived from it may exchange something else.
        """
        if "operators" in vars(type(self)):
            return None
        return f"the step's operators know no way for {self.carries} like {type(self).__name__}"


class RowLeg(Leg):
    """Brings splats to the ranks that draw them; in backward their gradients to where they came from."""

    carries = "rows"
    survives_giving_up: ClassVar[bool] = False
    """Whether a rank that failed while it rendered, or on the way back, can let the others go on."""
    travels: ClassVar[bool]
    """Whether rows leave the rank that owns their points."""
    relays: bool | None = False
    """Whether a row crosses once to each other machine, where a rank hands it on (see `Relays`); None for fused steps
    alone, where the ranks of each machine reach each other's memory."""

    def operators(self) -> RowOperators:
        """Operators that say which rows go where.

        Raises:
            NotImplementedError: the leg has none; see `unsupported_reason`.
        """
        raise NotImplementedError(self.unsupported_reason)

    @abstractmethod
    def bring(self, own: Splats, points: Points, views: Sequence[View], plan: Plan, world: World) -> Splats:
        """Splats of this rank's points (`own`, of `points`) -> splats of the patches that this rank draws."""


class LocalRows(RowLeg):
    """A rank draws the points that it holds."""

    survives_giving_up = True
    travels = False

    def operators(self) -> RowOperators:
        return RowOperators()

    def bring(self, own: Splats, points: Points, views: Sequence[View], plan: Plan, world: World) -> Splats:
        return own


class PixelLeg(Leg):
    """Makes a patch's pixels, at their owner, of what ranks have drawn."""

    carries = "pixels"
    survives_giving_up: ClassVar[bool] = True
    """As `RowLeg`'s."""

    @property
    def whole(self) -> bool:
        """Whether what a rank draws of all splats of a patch is the patch: on one rank, what the primitive renders."""
        return True

    def operators(self, world: World) -> PixelOperators:
        """Operators that exchange pixels.

        Raises:
            NotImplementedError: the leg has none; see `unsupported_reason`.
        """
        raise NotImplementedError(self.unsupported_reason)

    def draw(
        self, primitive: Primitive, splats: Splats, views: Sequence[View], plan: Plan, world: World
    ) -> list[Pixels]:
        """Draws what the plan has this rank draw, of `RowLeg.bring`'s splats."""
        return primitive.render(splats, plan.drawn[world.rank], views)

    @abstractmethod
    def settle(
        self, rendering: Rendering, splats: Splats, views: Sequence[View], plan: Plan, world: World
    ) -> Rendering:
        """What this rank has drawn -> the patches that it owns.

        Args:
            rendering: what was drawn here, and the splats of this rank's points.
            splats: what it was drawn from: `RowLeg.bring`'s.
            views, plan, world: as there.
        """


class WholePixels(PixelLeg):
    """Who draws a patch draws all that is in it, and owns it.

    What travels are the gradients of halo pixels, where there are halos: a densifier that sums magnitudes (AbsGS) has
    to have a pixel's whole gradient first (see `halo`).
    """

    def operators(self, world: World) -> PixelOperators:
        return WholePixelOperators()

    def settle(
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
    """Makes the gradients of parameters whole, around the backward pass."""

    carries = "gradients"
    survives_giving_up: ClassVar[bool] = False
    """As `RowLeg`'s; see `give_up`."""
    summed: ClassVar[bool]
    """Whether every rank has all points, and their gradients are summed over ranks."""

    def operators(
        self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int, *, peer: bool
    ) -> Transport:
        """Transport of gradients over several ranks where rows are local.

        Args:
            world, kernels, rows, capacity, words: see `Transport`.
            peer: whether all ranks reach each other's memory.

        Raises:
            NotImplementedError: the leg has none; see `unsupported_reason`.
        """
        raise NotImplementedError(self.unsupported_reason)

    def render_begins(self, points: Points) -> None:
        """Told of the points that this rank holds, before they are rendered."""
        return

    @abstractmethod
    def begin_backward(self, params: Iterable[Tensor]) -> None:
        """Called before backward with every parameter that an optimizer updates, in the model's order."""

    @abstractmethod
    def end_backward(self) -> None:
        """Called after backward, before the optimizers step: all gradients are final when it returns."""

    def give_up(self, params: Iterable[Tensor]) -> None:
        """Called in the place of what is missing of rendering, `begin_backward`, backward and `end_backward`, by a rank
        that could not go on: takes part in what the others still wait for. All must then drop the step's gradients.

        Args:
            params: as `begin_backward`'s.
        """
        return


class SummedGradients(GradientLeg):
    """Replicas sum their gradients, in large buckets that leave while backward still runs."""

    survives_giving_up = True
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

    def give_up(self, params: Iterable[Tensor]) -> None:
        self._buckets.finish_unready(list(params))


class GradientsToOwner(GradientLeg):
    """A point's gradient is whole at its owner, once rows' gradients have come back to it. Parameters that are not the
    points' (of camera poses, say) are replicated, and their gradients summed."""

    survives_giving_up = True
    summed = False

    def __init__(self, world: World) -> None:
        self._buckets = GradientBuckets(world)
        self._points: list[weakref.ref[Tensor]] = []
        self._replicated: list[Tensor] = []

    def operators(
        self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int, *, peer: bool
    ) -> Transport:
        return KeptRows(world, kernels, rows, capacity, words)

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
