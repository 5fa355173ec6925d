"""Ownership of points: at the start, at a refinement and on resume.

Ownership is independent of the points' order. The order of a whole model follows from the points' positions
(`primitives.morton`) when it was last sorted, on any ranks. A point's *place* is its number in that order. Random
numbers of a point are keyed by its place, so that any placement trains the same model. Each owner keeps its points in
ascending places.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, final

import torch
from torch import Tensor

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.assign.splitters import find_splitters, imbalance
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import POSITION
from ns_multigpu.core.types import FAR, Points, View

Shares = Sequence[range] | Sequence[Tensor]
"""Places of each rank's points, ascending: ranges, or [N] int64."""


@dataclass(frozen=True)
class NewPoints:
    """Points of a rank after a refinement, kept or new, in ascending keys.

    Attributes:
        keys: [N] int64 in [0, 2^62), which order all ranks' points.
        positions: returns [N, 3] on demand.
        work: [N] int64, at least 0: work of each point. works: of all points of each rank, together.
        threshold: allowed ratio of a rank's work to the mean before points are redistributed; at least 1.
    """

    keys: Tensor
    positions: Callable[[], Tensor]
    work: Tensor
    works: Sequence[int]
    threshold: float


@dataclass(frozen=True)
class PlacementResult:
    """Owner of each of a rank's new points.

    Attributes:
        owners: [N] int64.
        redistributed: True if points were redistributed for equal work; the same on every rank.
    """

    owners: Tensor
    redistributed: bool = False


class Placement(ABC):
    """Assignment of points to ranks. Results and state depend on the arguments, not on the calling rank.

    Attributes:
        replicated: True if every rank holds every point (densification must be the same on each).
        in_ranges: True if each rank holds a contiguous range of the whole model's order, in the ranks' order. Places
            then follow from the ranks' numbers of points and are not stored.
    """

    replicated: ClassVar[bool]
    in_ranges: ClassVar[bool]

    @property
    def kind(self) -> str | None:
        """Placement's name in a checkpoint with rows rank by rank; None if rows are in the whole model's
        order. A run with as many ranks and the same kind resumes with each rank's points."""
        return None if self.in_ranges else type(self).__name__

    def look(self, views: Callable[[], Sequence[View]], far: float = FAR) -> None:
        """Receive the training views, before any other call.

        Args:
            views: returns all training views on demand, the same on every rank.
            far: largest depth that they draw, world units.
        """
        return

    def remarks(self) -> list[str]:
        """Return warnings for the user since the last call about requests that were not met; on rank 0."""
        return []

    def moved(self, positions: Tensor) -> None:
        """Receive the positions [N, 3] of this rank's points at the time of placement. Does not wait."""
        return

    def observe(self, points: Points, extents: Callable[[], Tensor | None], images: int | None, world: World) -> None:
        """Receive this rank's current points, before views of them are planned. Every rank calls it together.

        Args:
            points: the same rows, in the same order, from one refinement to the next.
            extents: see `Primitive.extents`.
            images: number of images trained on so far; None for an evaluation view, which must not affect training.
        """
        return

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint; empty if there is none.

        Every rank calls it together.
        """
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state from `state` of a placement of the same kind. With as many ranks, each keeps its
        points; otherwise `shares` is called next."""
        return

    def arranged(self, size: int) -> Callable[[list[int], int], list[int]] | None:
        """Return the function that orders an epoch's views for steps of `size` views (see `ViewSequence.arrange`); None
        to keep the drawn order. It must not depend on the number of ranks or on training, so that a resumed run has
        the same."""
        return None

    @property
    def placings(self) -> int:
        """Number of placements computed from the model so far; the same on every rank. 0 if it never does."""
        return 0

    @property
    def view_owners(self) -> Sequence[int]:
        """Owner machine of each training view, which holds its image; empty if views have none."""
        return ()

    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        """Return the positions of the views for which this rank splats its points, ascending: by default all of the
        batch's. The patches that a point overlaps are known only after splatting."""
        return plan.views()

    @abstractmethod
    def shares(self, count: int, positions: Callable[[], Tensor], ranks: int) -> Shares:
        """Return each rank's places of a whole model, at the start or on resume with another number of ranks.

        Every rank calls it together with the same model. `shares_of` converts owners to a result.

        Args:
            count: points of the whole model.
            positions: returns [count, 3], by place.
        """

    @abstractmethod
    def place(self, new: NewPoints, world: World) -> PlacementResult:
        """Return the owners of points after a refinement. Every rank calls it together, each with its own points."""

    @final
    def hold(self, points: Points, world: World) -> Points:
        """Return this rank's part of an ordered whole model, copied if it is not all, so that the rest can be freed.

        Raises:
            ValueError: the placement does not assign each of these points to one of these ranks.
        """
        if self.replicated:
            return points
        shares = self.shares(len(points), lambda: points.params[POSITION].detach(), world.size)
        own = checked_shares(self, shares, len(points), world.size)[world.rank]
        part = {name: rows_of(value.detach(), own).clone() for name, value in points.params.items()}
        self.moved(part[POSITION])
        return Points({name: part[name].requires_grad_(v.requires_grad) for name, v in points.params.items()})


class Replicated(Placement):
    """Placement of every point on every rank; all copies are identical."""

    replicated = True
    in_ranges = True

    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        return plan.views_of(world.rank)

    def shares(self, count: int, positions: Callable[[], Tensor], ranks: int) -> Shares:
        return [range(count)] * ranks

    def place(self, new: NewPoints, world: World) -> PlacementResult:
        """Keep each rank's copy."""
        return PlacementResult(torch.full_like(new.keys, world.rank))


class AllHere(Replicated):
    """Placement of every point on the only rank."""


@final
@dataclass(frozen=True)
class Sharded(Placement):
    """Contiguous ranges of the whole model's order, one per rank, in the order of the ranks.

    A point's place is the number of points of the ranks before its owner, plus its row there. So rows ordered by (view,
    owner, row there) are ordered by (view, place). Splats of equal depth are then blended in the order of `single`.
    With a placement without ranges, one owner's rows are still in ascending places, but equal depths of two owners are
    blended in the owners' order.

    Attributes:
        bounds: [ranks + 1] rank r initially owns the places [bounds[r], bounds[r + 1]), perhaps none; None for equal
            numbers.
    """

    bounds: tuple[int, ...] | None = None
    replicated: ClassVar[bool] = False
    in_ranges: ClassVar[bool] = True

    def shares(self, count: int, positions: Callable[[], Tensor], ranks: int) -> Shares:
        """Return ranges of equal size, or those of `bounds`.

        Raises:
            ValueError: the bounds do not fit the points or the ranks.
        """
        bounds = even_bounds(count, ranks) if self.bounds is None else self.bounds
        if len(bounds) != ranks + 1 or bounds[0] != 0 or bounds[-1] != count or list(bounds) != sorted(bounds):
            raise ValueError(
                f"bounds {list(bounds)} do not deal {count} points out to {ranks} ranks: give {ranks + 1} ascending "
                f"numbers from 0 to {count}"
            )
        return [range(bounds[rank], bounds[rank + 1]) for rank in range(ranks)]

    def place(self, new: NewPoints, world: World) -> PlacementResult:
        """Assign ranges of keys. Equal keys have one owner.

        If a rank has more than `threshold` times the mean work, the ranges are cut again into equal work. Otherwise
        each rank keeps its amount of work: the splitters are the keys where the work before them equals that of the
        ranks before. Points have moved little since the last refinement, so that most keep their owner.
        """
        works = new.works
        redistributed = imbalance(works) > new.threshold
        if redistributed:
            targets = [sum(works) * rank // world.size for rank in range(1, world.size)]
        else:
            targets = list(accumulate(works))[:-1]
        sums = torch.nn.functional.pad(new.work.cumsum(0), (1, 0))
        splitters = find_splitters(new.keys, sums, targets, world)
        return PlacementResult(torch.searchsorted(splitters, new.keys, right=True), redistributed)


def even_bounds(count: int, ranks: int) -> tuple[int, ...]:
    """Return [ranks + 1] ascending numbers from 0 to `count` whose differences differ by one at most."""
    return tuple(rank * count // ranks for rank in range(ranks + 1))


def shares_of(owners: Tensor, ranks: int) -> list[Tensor]:
    """Return the ranks' shares, where the owner of the point at place k is `owners[k]`, [N] int64.

    Raises:
        ValueError: an owner is no rank.
    """
    if wrong := int(((owners < 0) | (owners >= ranks)).sum()):
        raise ValueError(f"{wrong} of {len(owners)} points are given to owners that are not among the {ranks} ranks")
    places = torch.sort(owners, stable=True).indices
    return list(places.split(torch.bincount(owners, minlength=ranks).tolist()))


def checked_shares(placement: Placement, shares: Shares, count: int, ranks: int) -> Shares:
    """Return the shares unchanged, once checked.

    Raises:
        ValueError: there is not one for each rank, or they are not of `count` points together.
    """
    sizes = [len(share) for share in shares]
    if len(sizes) != ranks or sum(sizes) != count:
        raise ValueError(
            f"{type(placement).__name__} deals {count} points out in shares of {sizes}: there are {ranks} ranks, and "
            "each point belongs to one"
        )
    return shares


def rows_of(value: Tensor, rows: range | Tensor) -> Tensor:
    """Return rows of a tensor; a range gives a view."""
    return value[rows.start : rows.stop] if isinstance(rows, range) else value[rows.to(value.device)]
