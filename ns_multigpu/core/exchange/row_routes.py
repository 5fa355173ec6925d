"""The ways of a step's rows to the ranks that draw them, and of their gradients back, for steps through autograd."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import exchange_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.fp16_rows import Code
from ns_multigpu.core.exchange.intra_node import machine_world

Split = Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class Route(ABC):
    """Routes of rows to other ranks.

    Attributes:
        arriving: [owner][view] how many rows come from each, of each view.
        first_id: the global id of this rank's first point.
    """

    arriving: Sequence[Sequence[int]]
    first_id: int

    def there(self, rows: Tensor, world: World, code: Code | None = None) -> Tensor:
        """Exchange rows [M, columns] -> received rows [K, columns] in the order of (view, owner, row there).

        Args:
            code: how they are written where they leave this rank, or its machine; None for as they are.
        """
        pieces = self._there(rows, world, code)
        # Owners send each view's rows ascending: no keys need to be compared.
        views = range(len(self.arriving[0]))
        return torch.cat([rows[:0], *(of_owner[view] for view in views for of_owner in pieces)])

    def back(self, grads: Tensor, total: Tensor, world: World, code: Code | None = None) -> None:
        """Add [K, columns] gradients of received rows to the [M, columns] of the rows; `code` as above."""
        views, owners = len(self.arriving[0]), len(self.arriving)
        pieces = grads.split([self.arriving[owner][view] for view in range(views) for owner in range(owners)])
        by_owner = [torch.cat([grads[:0], *pieces[owner::owners]]) for owner in range(owners)]
        self._back(by_owner, total, world, code)

    @abstractmethod
    def _there(self, rows: Tensor, world: World, code: Code | None) -> Split:
        """[M, columns] -> what arrived, [owner][view]."""

    @abstractmethod
    def _back(self, by_owner: Sequence[Tensor], total: Tensor, world: World, code: Code | None) -> None:
        """Add gradients by owner to [M, columns], those of this rank's rows."""

    def _by_view(self, arrived: Tensor, owner: int) -> Sequence[Tensor]:
        return arrived.split(list(self.arriving[owner]))


@dataclass(frozen=True)
class DirectRoute(Route):
    """To each rank what it needs.

    Attributes:
        chosen: [rank] the rows of this rank that go to each, ascending.
    """

    chosen: Sequence[Tensor]

    def _there(self, rows: Tensor, world: World, code: Code | None) -> Split:
        leaving = [rows[chosen] for chosen in self.chosen]
        arrived = swap(leaving, [sum(counts) for counts in self.arriving], world, code)
        return [self._by_view(one, owner) for owner, one in enumerate(arrived)]

    def _back(self, by_owner: Sequence[Tensor], total: Tensor, world: World, code: Code | None) -> None:
        back = swap(by_owner, [len(chosen) for chosen in self.chosen], world, code)
        _add(total, zip(self.chosen, back, strict=True))


@dataclass(frozen=True)
class RelayedRoute(Route):
    """To each rank of this machine what it needs, and to one rank of each other machine what any of its ranks needs,
    which hands it on: see `Relays`.

    Gradients are summed where they were handed on first, in the order of that machine's ranks; then at their owner, the
    ranks of its machine first, and the machines in their order.

    Attributes:
        inside: [local rank] the rows of this rank that go to each of its machine, ascending.
        across: [machine] those that go to each machine; none to its own.
        handed: [machine][local rank] which of the rows that came from there go on to each, ascending.
        meeting: [machine] how many rows come from there.
    """

    inside: Sequence[Tensor]
    across: Sequence[Tensor]
    handed: Sequence[Sequence[Tensor]]
    meeting: Sequence[int]

    def _there(self, rows: Tensor, world: World, code: Code | None) -> Split:
        came = cross([rows[chosen] for chosen in self.across], self.meeting, world, code)
        giving: list[Tensor] = []
        for local, own in enumerate(self.inside):
            handed = [rows[own] if k == world.machine else came[k][self.handed[k][local]] for k in range(len(came))]
            giving.append(torch.cat(handed))
        each, machines = world.local_size, world.machines
        sizes = [[sum(self.arriving[k * each + giver]) for k in range(machines)] for giver in range(each)]
        taken = swap(giving, [sum(of) for of in sizes], machine_world(world), None)
        parts = [one.split(of) for one, of in zip(taken, sizes, strict=True)]
        owners = [(k, giver) for k in range(machines) for giver in range(each)]
        return [self._by_view(parts[giver][k], owner) for owner, (k, giver) in enumerate(owners)]

    def _back(self, by_owner: Sequence[Tensor], total: Tensor, world: World, code: Code | None) -> None:
        each, machines, own = world.local_size, world.machines, world.machine
        returning = [torch.cat(list(by_owner[giver::each])) for giver in range(each)]
        sizes = [
            [len(self.inside[taker] if k == own else self.handed[k][taker]) for k in range(machines)]
            for taker in range(each)
        ]
        back = swap(returning, [sum(of) for of in sizes], machine_world(world), None)
        parts = [one.split(of) for one, of in zip(back, sizes, strict=True)]
        sums = [total.new_zeros(count, total.shape[1]) for count in self.meeting]
        for k, some in enumerate(sums):
            _add(some, ((self.handed[k][taker], parts[taker][k]) for taker in range(each) if k != own))
        crossed = cross(sums, [len(chosen) for chosen in self.across], world, code)
        inside = ((chosen, parts[taker][own]) for taker, chosen in enumerate(self.inside))
        _add(total, [*inside, *zip(self.across, crossed, strict=True)])


def swap(leaving: Sequence[Tensor], arriving: Sequence[int], world: World, code: Code | None) -> Sequence[Tensor]:
    """All-to-all: [rank] rows for each rank -> [rank] rows from each. What a rank keeps is neither coded nor sent.

    Args:
        arriving: how many come from each.
    """
    own = leaving[world.rank]
    others = [one if rank != world.rank else one[:0] for rank, one in enumerate(leaving)]
    come = [count if rank != world.rank else 0 for rank, count in enumerate(arriving)]
    out = torch.cat(others)
    with world.traffic.measured():
        into = exchange_rows(out if code is None else code.write(out), [len(one) for one in others], come, world)
    arrived = (into if code is None else code.read(into, own)).split(come)
    return [own if rank == world.rank else one for rank, one in enumerate(arrived)]


def cross(leaving: Sequence[Tensor], arriving: Sequence[int], world: World, code: Code | None) -> Sequence[Tensor]:
    """[machine] rows for this rank's counterpart on each machine -> [machine] rows from each; none from its own."""
    places = range(world.local_rank, world.size, world.local_size)
    out = [leaving[0][:0]] * world.size
    come = [0] * world.size
    for place, rows, count in zip(places, leaving, arriving, strict=True):
        out[place], come[place] = rows, count
    arrived = swap(out, come, world, code)
    return [arrived[place] for place in places]


def _add(total: Tensor, parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add parts to [rows, columns], each of them rows' numbers and what is to be added there."""
    # A part after the other, each row at most once in it: the same bits on every run, also on a GPU.
    for chosen, piece in parts:
        total.index_add_(0, chosen, piece)


def chosen_rows(touch: Tensor, count: int) -> Tensor:
    """[count] int64, the rows where [M] bool is true, ascending.

    Args:
        count: how many they are, known to the host already: the device is not waited for.
    """
    # The k-th row that touches is where the running count comes to k.
    return torch.searchsorted(touch.cumsum(0), torch.arange(1, count + 1, device=touch.device))


def packed(columns: Sequence[Tensor]) -> Tensor:
    """[M, ...] tensors of one type -> [M, all columns]."""
    return torch.cat([column.unsqueeze(1) if column.dim() == 1 else column.flatten(1) for column in columns], dim=1)


def unpacked(rows: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """[K, all columns] -> what `packed` was given, taken apart: [K, *shape] each, contiguous.

    Each has memory of its own. Part of a single row is contiguous as it is, but does not begin where a kernel can read
    two or four numbers at once.
    """
    if len(shapes) == 1:
        return [rows.reshape(len(rows), *shapes[0]).contiguous()]
    pieces = rows.split([math.prod(shape) for shape in shapes], dim=1)
    return [
        piece.clone(memory_format=torch.contiguous_format).view(len(rows), *shape)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]
