"""Plan of a step's batch: which rank draws which patches, and which rank owns which pixels."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from ns_multigpu.core.types import Patch, View


@dataclass(frozen=True)
class Plan:
    """Drawn and owned patches of a batch. Frozen and hashable: prepared state is looked up by plan.

    Attributes:
        drawn: [rank] the patches that each rank draws.
        owned: [rank] the patches whose pixels and loss each rank has in the end. The patches of a view cover it without
            overlap, so a plan gives the sizes of its views. The same as `drawn`, unless the strategy exchanges pixels.
        order: [view] its cells, front to back, if views are drawn cell by cell: `drawn` patches may then overlap, and
            need not cover a view. Empty otherwise.
        hidden: rectangles of cells that are in sight and not drawn; transmittance in front is still measured.
        partition: the cells of space, if views are drawn cell by cell: prepared state holds their planes.
    """

    drawn: tuple[tuple[Patch, ...], ...]
    owned: tuple[tuple[Patch, ...], ...]
    order: tuple[tuple[int, ...], ...] = ()
    hidden: tuple[Patch, ...] = ()
    partition: Hashable = None

    def __hash__(self) -> int:
        # Kept: a step asks for it several times, and there are many numbers in a plan.
        found = self.__dict__.get("_hash")
        if found is None:
            found = hash((self.drawn, self.owned, self.order, self.hidden, self.partition))
            object.__setattr__(self, "_hash", found)
        return found  # type: ignore[no-any-return]

    @staticmethod
    def of(drawn: Iterable[Iterable[Patch]], owned: Iterable[Iterable[Patch]] | None = None) -> "Plan":
        """Return the plan of patches given by rank. A patch's owner is the rank that draws it unless `owned` is
        given."""
        patches = tuple(tuple(of_rank) for of_rank in drawn)
        return Plan(patches, patches if owned is None else tuple(tuple(of_rank) for of_rank in owned))

    def without_halos(self) -> "Plan":
        """Return the plan with halos of 0, for rendering without a loss. Other ranks draw those pixels."""
        drawn, owned = (
            tuple(tuple(replace(patch, halo=0) for patch in patches) for patches in ranks)
            for ranks in (self.drawn, self.owned)
        )
        return replace(self, drawn=drawn, owned=owned)

    def of_views(self, positions: range) -> "Plan":
        """Return the plan with the drawn and owned patches of these views of the batch alone."""

        def of(ranks: Iterable[Sequence[Patch]]) -> tuple[tuple[Patch, ...], ...]:
            return tuple(tuple(patch for patch in patches if patch.view in positions) for patches in ranks)

        return replace(self, drawn=of(self.drawn), owned=of(self.owned))

    def patches(self) -> list[Patch]:
        """Return all drawn patches by view, then row, then column. The order is independent of their ranks."""
        drawn = (patch for patches in self.drawn for patch in patches)
        return sorted(drawn, key=lambda patch: (patch.view, patch.y0, patch.x0))

    def views(self) -> list[int]:
        """Return the positions of all views that any rank owns pixels of, ascending: all of the batch's."""
        return sorted({patch.view for patches in self.owned for patch in patches})

    def views_of(self, rank: int) -> list[int]:
        """Return the positions of the views that `rank` draws, ascending."""
        return sorted({patch.view for patch in self.drawn[rank]})


def rectangles(plan: Plan, views: Sequence[View], numbers: Sequence[int]) -> list[int]:
    """Return 6 integers for each patch: number of the rank that draws it, view, x0, y0, x1, y1, halo included."""
    return [
        n
        for rank, patches in enumerate(plan.drawn)
        for patch in patches
        for n in (numbers[rank], patch.view, *patch.rendered(views[patch.view]))
    ]
