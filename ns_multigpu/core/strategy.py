"""A strategy: one placement, one assignment and one exchange, under a name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ns_multigpu.core.assignment import Assignment
from ns_multigpu.core.exchange import Exchange
from ns_multigpu.core.placement import Placement, Plan
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.types import Points, Rendering, View
from ns_multigpu.core.world import World


@final
@dataclass(frozen=True)
class Strategy:
    """How the work of a step is spread over the ranks of one world.

    Attributes:
        name: what the user types.
        placement: which rank owns which point.
        assignment: which rank renders which patch.
        exchange: what crosses the wire; it belongs to this strategy alone, for it may hold buffers.
        world: the ranks.
    """

    name: str
    placement: Placement
    assignment: Assignment
    exchange: Exchange
    world: World

    def plan(self, views: Sequence[View], holders: Sequence[int] | None = None) -> Plan:
        """The patches of `views` by rank; `holders` are the ranks that hold the views' images, if any."""
        return self.assignment.assign(views, self.world.size, holders)

    def render(self, primitive: Primitive, points: Points, views: Sequence[View], plan: Plan) -> Rendering:
        """Renders this rank's patches of the batch.

        Every rank calls it, with its own points and the same views and plan.

        Args:
            primitive: what the points are.
            points: those that this rank holds.
            views: the step's batch; gradients flow to their poses.
            plan: what `plan` returned for them.
        """
        hits = primitive.cull(points, views, self.placement.views_to_splat(plan, self.world))
        own = primitive.splat(points, hits, views)
        splats = self.exchange.before_render(own, points, views, plan, self.world)
        pixels = primitive.render(splats, plan[self.world.rank], views)
        return self.exchange.after_render(Rendering(pixels, own), splats, views, plan, self.world)
