"""What crosses the wire in a step: gradients, splats or partial pixels."""

from abc import ABC
from collections.abc import Iterable, Sequence
from typing import ClassVar

from torch import Tensor

from ns_multigpu.core.buckets import GradientBuckets
from ns_multigpu.core.placement import Plan
from ns_multigpu.core.types import Points, Rendering, Splats, View
from ns_multigpu.core.world import World


class Exchange(ABC):  # noqa: B024  (every hook has a meaning when left alone: nothing crosses there)
    """Hooks around rendering and around the backward pass. What a subclass leaves alone exchanges nothing there."""

    survives_giving_up: ClassVar[bool] = False
    """Whether a rank that failed while it rendered, or on the way back, can let the others go on: see `give_up`."""

    def before_render(self, own: Splats, points: Points, views: Sequence[View], plan: Plan, world: World) -> Splats:
        """Splats of this rank's points (`own`, of `points`) -> splats of this rank's patches."""
        return own

    def after_render(
        self, rendering: Rendering, splats: Splats, views: Sequence[View], plan: Plan, world: World
    ) -> Rendering:
        """Pixels of this rank's splats -> pixels of this rank's patches.

        Args:
            rendering: what was rendered here, and the splats of this rank's points.
            splats: what it was rendered from: `before_render`'s.
            views, plan, world: as there.
        """
        return rendering

    def begin_backward(self, params: Iterable[Tensor]) -> None:
        """Called before backward with every parameter that an optimizer updates, in the model's order."""
        return

    def end_backward(self) -> None:
        """Called after backward, before the optimizers step: all gradients are final when it returns."""
        return

    def give_up(self, params: Iterable[Tensor]) -> None:
        """Called in the place of what is missing of rendering, `begin_backward`, backward and `end_backward`, by a rank
        that could not go on: takes part in what the others still wait for. All must then drop the step's gradients.

        Args:
            params: as `begin_backward`'s.
        """
        return


class Nothing(Exchange):
    """No rank needs anything of another."""

    survives_giving_up = True


class SummedGradients(Exchange):
    """Replicas sum their gradients, in large buckets that leave while backward still runs."""

    survives_giving_up = True

    def __init__(self, world: World) -> None:
        self._buckets = GradientBuckets(world)

    def begin_backward(self, params: Iterable[Tensor]) -> None:
        self._buckets.watch(list(params))

    def end_backward(self) -> None:
        self._buckets.finish()

    def give_up(self, params: Iterable[Tensor]) -> None:
        self._buckets.finish_unready(list(params))
