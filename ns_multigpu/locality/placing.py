"""Placement of `locality`: points are owned near the views that show them (section 4.2.1)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ns_multigpu.core.assign.placement import NewPoints, Placement, PlacementResult, Shares, shares_of
from ns_multigpu.core.assign.splitters import imbalance
from ns_multigpu.core.dist.collectives import all_gather_ints, all_gather_rows, broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import FAR, View
from ns_multigpu.locality.counting import PatchCounter
from ns_multigpu.locality.graph import SeenGraph
from ns_multigpu.locality.groups import LEAST, Groups, cube_around, group_size, z_codes
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.locality.partition import IMBALANCE, partition
from ns_multigpu.locality.rules import Access

MOST_SAMPLED = 4_000_000
"""Points that are looked at to place a model: of a larger one every k-th. A group still has 32 of them."""
MOST_VIEWS = 2000
"""Views that METIS is given: of more, so many drawn at random."""
_AT_ONCE = 1 << 20
"""Points whose owners are found at once: their places on the curve take some 100 bytes each."""
_WORSE = 1.1
"""Points are redistributed when they have become so much less level than they were when they were placed."""
_GROUPS_PER_RANK = 32
"""Groups that each rank has at least, where points suffice: else they could not be level."""


@dataclass(frozen=True)
class GroupOwners:
    """Owners of regions of space: groups are ranges of the Z-order.

    Attributes:
        low: [3] float64, side: the cube of the curve, world units.
        starts: [C] int64 ascending, the code where each group begins; what lies before the first belongs to it.
        owners: [C] int64, the rank that owns each group.
        points: of the model that this was made for. level: of these, the most that a rank had over the mean.
        view_machines: [V] int64, the machine whose groups each training view sees most of; empty without views.
    """

    low: Tensor
    side: float
    starts: Tensor
    owners: Tensor
    points: int
    level: float
    view_machines: NDArray[np.int64]

    def of(self, positions: Tensor) -> Tensor:
        """Return the owners [N] int64 of points at these positions [N, 3]."""
        low, starts, owners = (part.to(positions.device) for part in (self.low, self.starts, self.owners))
        found = [owners[:0]]
        for some in positions.split(_AT_ONCE):
            places = torch.searchsorted(starts, z_codes(some, low, self.side), right=True) - 1
            found.append(owners[places.clamp_(min=0)])
        return torch.cat(found)


class ByViews(Placement):
    """Placement of groups on the machines whose views show them, balanced over each machine's GPUs.

    Rank 0 partitions a sample of the points and broadcasts the result: METIS promises nothing for machines of different
    kinds. Between partitions, a point's group and owner follow from its position. Points are placed again at the start,
    when the model has grown by a factor, when work is unbalanced, and when a run resumes with other ranks.

    Args:
        world: the ranks. options: see there. access: records what the patches of each view need from each rank.

    Attributes:
        group_owners: as points were placed last; None before.
    """

    replicated = False
    in_ranges = False

    def __init__(self, world: World, options: LocalityOptions, access: Access) -> None:
        self._world, self._options, self._access = world, options, access
        self._look: Callable[[], Sequence[View]] = lambda: ()
        self._far = FAR
        self._remarks: list[str] = []
        self._placings = 0
        self.group_owners: GroupOwners | None = None

    @property
    def kind(self) -> str:
        """Name of the placement, with the ranks' distribution over machines."""
        return f"ByViews {self._world.machines}x{self._world.size // self._world.machines}"

    def look(self, views: Callable[[], Sequence[View]], far: float = FAR) -> None:
        self._look, self._far = views, far

    def remarks(self) -> list[str]:
        found, self._remarks = self._remarks, []
        return found

    @property
    def placings(self) -> int:
        return self._placings

    @property
    def view_owners(self) -> Sequence[int]:
        return () if self.group_owners is None else self.group_owners.view_machines.tolist()

    def shares(self, count: int, positions: Callable[[], Tensor], ranks: int) -> Shares:
        """See `Placement.shares`.

        Raises:
            ValueError: other ranks are asked about than those of the world.
        """
        if ranks != self._world.size:
            raise ValueError(f"points are placed on the {self._world.size} ranks of this run, not on {ranks}")
        if ranks == 1 or count == 0:
            return [range(count)] + [range(count, count)] * (ranks - 1)
        where = positions().detach()
        self._place(where[:: _stride(count)], count)
        assert self.group_owners is not None
        return shares_of(self.group_owners.of(where), ranks)

    def place(self, new: NewPoints, world: World) -> PlacementResult:
        """Place each point by the group that contains it. Partition again if the model has grown or a rank has too many
        points.

        Points count equally, whatever their work: this placement balances numbers of points and views.
        """
        total = sum(row[0] for row in all_gather_ints([len(new.keys)], world))
        if world.size == 1 or total == 0:
            return PlacementResult(torch.zeros_like(new.keys))
        where = new.positions().detach()
        grown = self.group_owners is None or total > self._options.place_again_at * max(self.group_owners.points, 1)
        if self.group_owners is not None and not grown:
            owners = self.group_owners.of(where)
            # Groups may be too few to be level: then it is no use to try again.
            allowed = max(new.threshold, IMBALANCE, _WORSE * self.group_owners.level)
            if imbalance(self._held(owners)) <= allowed:
                return PlacementResult(owners)
        sample, _ = all_gather_rows(where[:: _stride(total)].contiguous(), world)
        self._place(sample, total)
        assert self.group_owners is not None
        return PlacementResult(self.group_owners.of(where), redistributed=True)

    def state(self) -> dict[str, Tensor]:
        found = self.group_owners
        if found is None:
            return {}
        views, needed = self._access.state()
        return {
            "low": found.low, "side": torch.tensor([found.side], dtype=torch.float64), "starts": found.starts,
            "owners": found.owners, "points": torch.tensor([found.points]),
            "level": torch.tensor([found.level], dtype=torch.float64),
            "view_machines": torch.from_numpy(found.view_machines), "needs_views": torch.from_numpy(views),
            "needs": torch.from_numpy(needed),
        }  # fmt: skip

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        if "owners" not in state:
            return
        known = {name: value.cpu() for name, value in state.items()}
        self.group_owners = GroupOwners(
            known["low"], float(known["side"]), known["starts"], known["owners"], int(known["points"]),
            float(known["level"]), known["view_machines"].numpy(),
        )  # fmt: skip
        if known["needs"].shape[1:] == (self._access.patches, self._access.ranks):  # patches are an option
            self._access.load_state(known["needs_views"].numpy(), known["needs"].numpy())

    # ---- placing ----

    def _held(self, owners: Tensor) -> list[int]:
        """Return the number of all ranks' points that each rank would hold."""
        mine = torch.bincount(owners, minlength=self._world.size).tolist()
        return [sum(column) for column in zip(*all_gather_ints(mine, self._world), strict=True)]

    def _place(self, sample: Tensor, points: int) -> None:
        """Place a model of so many points, of which every rank has the same sample [S, 3]."""
        made: tuple[GroupOwners, tuple[NDArray[np.int64], NDArray[np.float32]]] | Exception | None = None
        if self._world.is_main:
            try:
                made = self._placed(sample, points)
            except Exception as error:  # the others wait for what is said here
                made = error
        made = broadcast_object(made, 0, self._world)
        if isinstance(made, Exception):
            raise made
        assert made is not None
        self.group_owners, needs = made
        self._placings += 1
        self._access.load_state(*needs)

    def _placed(self, sample: Tensor, points: int) -> tuple[GroupOwners, tuple[NDArray[np.int64], NDArray[np.float32]]]:
        world, stride = self._world, max(1, round(points / len(sample)))
        low, side = cube_around(sample)
        codes, order = torch.sort(z_codes(sample, low, side), stable=True)
        groups = Groups.along(sample, order, _sampled_group_size(self._options.group_size, points, world.size, stride))
        owners, machines, needs = self._owners(groups, sample, stride)
        level = imbalance(np.bincount(owners, weights=groups.points.cpu().numpy(), minlength=world.size).tolist())
        starts = codes[:: groups.size].contiguous().cpu()
        return GroupOwners(low.cpu(), side, starts, torch.from_numpy(owners), points, level, machines), needs

    def _owners(
        self, groups: Groups, sample: Tensor, stride: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Return each group's owner, each view's machine, and the views with counted patches and what these need."""
        world, views = self._world, self._look()
        none = np.zeros(0, dtype=np.int64), np.zeros((0, self._access.patches, world.size), dtype=np.float32)
        counter = PatchCounter(groups, sample, self._far)
        some = np.sort(np.random.default_rng(0).permutation(len(views))[:MOST_VIEWS])
        seen = counter.by_group([views[k] for k in some]) if views else None
        if len(groups) < world.size or seen is None or seen.nnz == 0:
            if seen is not None:
                why = f"{len(groups)} groups are too few" if seen.nnz else "no training view shows any"
                self._remarks.append(f"Points are placed by ranges of the Z-order: {why}.")
            owners = np.arange(len(groups), dtype=np.int64) * world.size // len(groups)
            return owners, np.zeros(0, dtype=np.int64), none
        graph = SeenGraph(seen * stride, (groups.points * stride).cpu().numpy())
        found = partition(graph, world.machines, world.size // world.machines)
        self._remarks += found.notes
        needed = counter.by_rank(views, self._options.patches, found.ranks, world.size) * np.float32(stride)
        if empty := int((needed.sum((1, 2)) == 0).sum()):
            self._remarks.append(f"{empty} of {len(views)} training views show none of the points that were looked at.")
        indices = np.array([view.index for view in views], dtype=np.int64)
        return found.ranks, _machines(needed, world.machines), (indices, needed)


def _machines(needed: NDArray[np.float32], machines: int) -> NDArray[np.int64]:
    """Return the machine [V] whose points each view sees most of; views that see none are distributed round-robin."""
    by_machine = needed.sum(1).reshape(len(needed), machines, -1).sum(2)
    empty = by_machine.sum(1) == 0
    return np.where(empty, np.cumsum(empty) % machines, by_machine.argmax(1)).astype(np.int64)


def _stride(points: int) -> int:
    return -(-points // MOST_SAMPLED)


def _sampled_group_size(wanted: int, points: int, ranks: int, stride: int) -> int:
    """Return the number of the sample's points in a group: as the option asks, else by the size of the model."""
    if wanted:
        return max(1, wanted // stride)
    size = min(group_size(points), max(LEAST, points // (_GROUPS_PER_RANK * ranks)))
    return max(1, min(size // stride, points // stride // (2 * ranks)))  # of tiny models
