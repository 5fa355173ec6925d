"""A strategy: a placement, an assignment and three legs, with a name."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from ns_multigpu.core.assign.assignment import Assignment
from ns_multigpu.core.assign.placement import Placement
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.legs import GradientLeg, PixelLeg, RowLeg
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.types import Patch, Points, Rendering, View


@final
@dataclass(frozen=True)
class Strategy:
    """Distribution of a step's work over the ranks of one world.

    Attributes:
        name: what the user types.
        placement: which rank owns which point.
        assignment: which rank draws which patch.
        rows, pixels, gradients: the legs, what crosses the wire. They belong to this strategy alone: they may hold
            buffers.
        world: the ranks.

    Raises:
        ValueError: the pieces contradict each other.
    """

    name: str
    placement: Placement
    assignment: Assignment
    rows: RowLeg
    pixels: PixelLeg
    gradients: GradientLeg
    world: World
    _by_size: dict[tuple[tuple[int, int], ...], Plan] = field(
        default_factory=dict[tuple[tuple[int, int], ...], Plan], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        several = self.world.size > 1
        if several and self.placement.replicated and (self.rows.is_exchanged or not self.gradients.summed):
            raise ValueError(
                f"strategy {self.name}: where every rank holds every point, rows stay and gradients are summed "
                "(LocalRows, SummedGradients)."
            )
        if several and not self.placement.replicated and self.gradients.summed:
            raise ValueError(
                f"strategy {self.name}: where points are sharded each has one owner, so that its gradient goes there "
                "(GradientsToOwner)."
            )

    @property
    def can_cancel(self) -> bool:
        """True if a rank that fails in a step can cancel it on all ranks: see `GradientLeg.cancel`."""
        return all(leg.can_cancel for leg in (self.rows, self.pixels, self.gradients))

    def observe(self, primitive: Primitive, points: Points, images: int | None = None) -> None:
        """Pass this rank's points to the placement before views of them are planned. Every rank calls it.

        Args:
            images: that training has seen; None for a view that is not trained on.
        """
        self.placement.observe(points, lambda: primitive.extents(points), images, self.world)

    def plan(self, views: Sequence[View], holders: Sequence[int] | None = None) -> Plan:
        """Return the plan for a batch. `holders` are the ranks that hold the views' images, if any.

        Raises:
            ValueError: a view is cut though every rank holds every point.
        """
        return self._checked(self.assignment.assign(views, self.world.size, holders), views)

    def plan_alike(self, views: Sequence[View]) -> Plan:
        """Return a plan like `plan`'s that repeats an earlier one where that is nearly as good: see
        `Assignment.assign_alike`."""
        if not self.assignment.by_size:
            return self._checked(self.assignment.assign_alike(views, self.world.size), views)
        sizes = tuple((view.width, view.height) for view in views)
        if sizes not in self._by_size:
            self._by_size[sizes] = self._checked(self.assignment.assign_alike(views, self.world.size), views)
        return self._by_size[sizes]

    def _checked(self, plan: Plan, views: Sequence[View]) -> Plan:
        if self.placement.replicated and self.world.size > 1:
            for patches in plan.drawn:
                for patch in patches:
                    if patch != Patch.whole(patch.view, views[patch.view]):
                        raise ValueError(
                            f"strategy {self.name}: view {patch.view} of the batch is cut. Where every rank holds "
                            "every point one rank must draw a view whole: densification counts what that rank splats "
                            "for it. To cut views, place points with `Sharded`."
                        )
        return plan

    def render(self, primitive: Primitive, points: Points, views: Sequence[View], plan: Plan) -> Rendering:
        """Render the patches of the batch that this rank owns.

        Every rank calls it, with its own points and the same views and plan.

        Args:
            primitive: what the points are.
            points: those that this rank holds.
            views: the step's batch; gradients flow to their poses.
            plan: what `plan` returned for them.
        """
        self.gradients.render_begins(points)
        hits = primitive.cull(points, views, self.placement.views_to_splat(plan, self.world))
        own = primitive.splat(points, hits, views)
        splats = self.rows.exchange(own, points, views, plan, self.world)
        pixels = self.pixels.draw(primitive, splats, views, plan, self.world)
        return self.pixels.exchange(Rendering(pixels, own), splats, views, plan, self.world)
