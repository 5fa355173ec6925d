"""What crosses the wire in a step: gradients, splats or partial pixels."""

from abc import ABC
from collections.abc import Iterable

from torch import Tensor

from ns_multigpu.core.buckets import GradientBuckets
from ns_multigpu.core.placement import Plan
from ns_multigpu.core.types import Pixels, Splats
from ns_multigpu.core.world import World


class Exchange(ABC):  # noqa: B024  (every hook has a meaning when left alone: nothing crosses there)
    """Hooks around rendering and around the backward pass. What a subclass leaves alone exchanges nothing there."""

    def before_render(self, splats: Splats, plan: Plan, world: World) -> Splats:
        """Splats of this rank's points -> splats of this rank's patches."""
        return splats

    def after_render(self, pixels: list[Pixels], plan: Plan, world: World) -> list[Pixels]:
        """Pixels of this rank's splats -> pixels of this rank's patches."""
        return pixels

    def begin_backward(self, params: Iterable[Tensor]) -> None:
        """Called before backward with every parameter that an optimizer updates, in the model's order."""
        return

    def end_backward(self) -> None:
        """Called after backward, before the optimizers step: all gradients are final when it returns."""
        return


class Nothing(Exchange):
    """No rank needs anything of another."""


class SummedGradients(Exchange):
    """Replicas sum their gradients, in large buckets that leave while backward still runs."""

    def __init__(self, world: World) -> None:
        self._buckets = GradientBuckets(world)

    def begin_backward(self, params: Iterable[Tensor]) -> None:
        self._buckets.watch(list(params))

    def end_backward(self) -> None:
        self._buckets.finish()
