"""Which rank owns which point: at the start, at a refinement and on resume.

Ownership is one thing, the order of the points another. The order of a whole model follows from where its points lie
(`primitives.morton`), or lay when it was put in order last, whatever rank has them. A point's *place* is its number in
that order, and all that is drawn at random for a point goes by its place: so the ranks together train the same model,
whoever owns what. Each owner keeps its points in ascending places.
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
from ns_multigpu.core.types import Points, View

Shares = Sequence[range] | Sequence[Tensor]
"""For each rank the places of its points, ascending: ranges, or [N] int64."""


@dataclass(frozen=True)
class NewPoints:
    """What a rank knows of the points that a refinement has left it with or made of its own, in ascending keys.

    Attributes:
        keys: [N] int64 in [0, 2^62), by which all ranks' points are put in order.
        positions: gives [N, 3], for whoever wants them.
        work: [N] int64, at least 0: how much work each is. works: of all points of each rank, together.
        threshold: a rank may have so many times the mean work before points are to be dealt out anew; at least 1.
    """

    keys: Tensor
    positions: Callable[[], Tensor]
    work: Tensor
    works: Sequence[int]
    threshold: float


@dataclass(frozen=True)
class Settled:
    """Which rank is to own each of a rank's new points.

    Attributes:
        owners: [N] int64.
        anew: whether points were dealt out anew, for equal work; the same on every rank.
    """

    owners: Tensor
    anew: bool = False


class Placement(ABC):
    """Where points live. Its answers follow from its arguments, not from who asks, and so does what it remembers.

    Attributes:
        replicated: whether every rank holds every point (and densification must come out the same on each).
        in_ranges: whether the points of each rank stand, in the order of the whole model, behind those of the ranks
            before it. Nobody then has to keep places: they follow from how many points each rank has.
    """

    replicated: ClassVar[bool]
    in_ranges: ClassVar[bool]

    @property
    def kind(self) -> str | None:
        """What a checkpoint calls it, whose rows lie rank by rank; None where that is the order of the whole model.
        As many ranks as wrote one, with a placement of the same kind, go on with the points that each had."""
        return None if self.in_ranges else type(self).__name__

    def look(self, views: Callable[[], Sequence[View]]) -> None:
        """Told before anything is asked.

        Args:
            views: gives all training views, the same on every rank, for whoever wants them.
        """
        return

    def remarks(self) -> list[str]:
        """What was not done as asked since it was asked last, in words for the user; on rank 0."""
        return []

    def moved(self, positions: Tensor) -> None:
        """This rank's points are where it said, as they were when it did: at [N, 3]. Nobody waits for other ranks."""
        return

    def observe(self, points: Points, extents: Callable[[], Tensor | None], images: int | None, world: World) -> None:
        """Shown this rank's points, as they are, before views of them are planned. Every rank calls it together.

        Args:
            points: after the last refinement the same rows, in the same order, until the next.
            extents: see `Primitive.extents`.
            images: that training has seen; None for a view that is not trained on, of which nothing must follow for
                those that are.
        """
        return

    def knowledge(self) -> dict[str, Tensor]:
        """What answers depend on besides their arguments, for a checkpoint. Nothing, unless it remembers.

        Every rank calls it together."""
        return {}

    def load_state(self, knowledge: Mapping[str, Tensor]) -> None:
        """Goes on with what `knowledge` returned, of a placement of the same kind. Where there were as many ranks, each
        goes on with the points that it had; otherwise `shares` is asked next."""
        return

    def arranged(self, size: int) -> Callable[[list[int], int], list[int]] | None:
        """What puts the views of an epoch into the order in which steps of `size` views take them (see
        `ViewSequence.arrange`); None for the order in which they were drawn. It must not depend on how many ranks there
        are, nor on what was trained: a run that goes on has the same."""
        return None

    @property
    def placings(self) -> int:
        """How often it has looked at the model to place its points; the same on every rank. 0 where it never does."""
        return 0

    @property
    def homes_of_views(self) -> Sequence[int]:
        """The machine that each training view is at home on, and its image held on; empty where views have none."""
        return ()

    @abstractmethod
    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        """Positions of the views for which this rank splats the points that it holds, ascending."""

    @abstractmethod
    def shares(self, count: int, positions: Callable[[], Tensor], ranks: int) -> Shares:
        """Who owns what of a whole model, at the start and where a run goes on with another number of ranks.

        Every rank asks, together with the others, about the same model. `shares_of` makes an answer of owners.

        Args:
            count: points of the whole model.
            positions: gives [count, 3], by place.
        """

    @abstractmethod
    def settle(self, new: NewPoints, world: World) -> Settled:
        """Who is to own what after a refinement. Every rank asks together, each about its own points."""

    @final
    def hold(self, points: Points, world: World) -> Points:
        """This rank's part of a whole model that is in its order, copied if it is not all: the rest can be let go.

        Raises:
            ValueError: the placement's answer does not deal these points out to these ranks.
        """
        if self.replicated:
            return points
        shares = self.shares(len(points), lambda: points.params[POSITION].detach(), world.size)
        own = checked_shares(self, shares, len(points), world.size)[world.rank]
        part = {name: rows_of(value.detach(), own).clone() for name, value in points.params.items()}
        self.moved(part[POSITION])
        return Points({name: part[name].requires_grad_(v.requires_grad) for name, v in points.params.items()})


class AllHere(Placement):
    """Every point is on the only rank there is."""

    replicated = True
    in_ranges = True

    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        return plan.views_of(world.rank)

    def shares(self, count: int, positions: Callable[[], Tensor], ranks: int) -> Shares:
        return [range(count)] * ranks

    def settle(self, new: NewPoints, world: World) -> Settled:
        return Settled(torch.full_like(new.keys, world.rank))


class Replicated(Placement):
    """Every rank holds every point, and all copies stay identical."""

    replicated = True
    in_ranges = True

    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        return plan.views_of(world.rank)

    def shares(self, count: int, positions: Callable[[], Tensor], ranks: int) -> Shares:
        return [range(count)] * ranks

    def settle(self, new: NewPoints, world: World) -> Settled:
        """Each rank's copy stays its own."""
        return Settled(torch.full_like(new.keys, world.rank))


@final
@dataclass(frozen=True)
class Sharded(Placement):
    """Every point is on one rank: each owns a contiguous range of the whole model's order, in the order of the ranks.

    A point's place is the number of points of the ranks before its owner, plus its row there. So rows ordered by (view,
    owner, row there) are ordered by (view, place), and splats of equal depth are blended in the order in which `single`
    blends them. With a placement whose owners do not hold ranges, rows of one owner still stand in ascending places,
    but splats of equal depth of two owners are blended in the order of the owners.

    Attributes:
        bounds: [ranks + 1] in the beginning rank r owns the places [bounds[r], bounds[r + 1]), perhaps none; None for
            equal numbers.
    """

    bounds: tuple[int, ...] | None = None
    replicated: ClassVar[bool] = False
    in_ranges: ClassVar[bool] = True

    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        """All of the batch's views that anybody renders: which ranks' patches a point reaches only its splat tells."""
        return plan.views()

    def shares(self, count: int, positions: Callable[[], Tensor], ranks: int) -> Shares:
        """Ranges of equal numbers, or those of `bounds`.

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

    def settle(self, new: NewPoints, world: World) -> Settled:
        """Ranges of keys. Equal keys stay on one rank.

        Where a rank has more than `threshold` times the mean work, ranges are cut anew into equal work. Otherwise each
        keeps as much work as it has: the splitters are the keys where the work before them is that of the ranks before.
        Points were in order at the last refinement and have moved little since, so that most stay where they are.
        """
        works = new.works
        anew = imbalance(works) > new.threshold
        if anew:
            targets = [sum(works) * rank // world.size for rank in range(1, world.size)]
        else:
            targets = list(accumulate(works))[:-1]
        sums = torch.nn.functional.pad(new.work.cumsum(0), (1, 0))
        splitters = find_splitters(new.keys, sums, targets, world)
        return Settled(torch.searchsorted(splitters, new.keys, right=True), anew)


def even_bounds(count: int, ranks: int) -> tuple[int, ...]:
    """[ranks + 1] ascending numbers from 0 to `count` whose differences differ by one at most."""
    return tuple(rank * count // ranks for rank in range(ranks + 1))


def shares_of(owners: Tensor, ranks: int) -> list[Tensor]:
    """The shares of ranks, where the point at place k is to be on rank `owners[k]`, [N] int64.

    Raises:
        ValueError: an owner is no rank.
    """
    if wrong := int(((owners < 0) | (owners >= ranks)).sum()):
        raise ValueError(f"{wrong} of {len(owners)} points are given to owners that are not among the {ranks} ranks")
    places = torch.sort(owners, stable=True).indices
    return list(places.split(torch.bincount(owners, minlength=ranks).tolist()))


def checked_shares(placement: Placement, shares: Shares, count: int, ranks: int) -> Shares:
    """The same shares.

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
    """Rows of a tensor: of a range a view."""
    return value[rows.start : rows.stop] if isinstance(rows, range) else value[rows.to(value.device)]
