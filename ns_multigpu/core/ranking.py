# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The order of rows that lie on any rank: where each stands among all ranks' rows, and what stands before it.

Keys travel to ranks that hold equal ranges of them, are sorted there, and what is found goes back to where they came
from. What a rank asks of others is a few numbers for each of its own rows: nobody sees all of them.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_ints, exchange_counts, exchange_rows
from ns_multigpu.core.splitters import find_splitters
from ns_multigpu.core.world import World


@dataclass(frozen=True)
class Ranking:
    """All ranks' rows in one order, this rank's among them.

    Attributes:
        places: [N] int64, how many of all ranks' rows stand before each of this rank's.
    """

    places: Tensor
    _world: World
    _leave: Tensor
    _send: list[int]
    _receive: list[int]
    _order: Tensor

    @staticmethod
    def of(keys: Tensor, world: World, ties: Tensor | None = None) -> "Ranking":
        """The order by key, then by tie, then by rank and row. Every rank calls it.

        Args:
            keys: [N] int64 in [0, 2^62), in any order.
            ties: [N] int64; None where keys are never equal, or by rank and row if they are.
        """
        keys, leave = torch.sort(keys, stable=True)
        total = sum(row[0] for row in all_gather_ints([len(keys)], world))
        sums = torch.arange(len(keys) + 1, device=keys.device)
        targets = [total * rank // world.size for rank in range(1, world.size)]
        splitters = torch.tensor(
            find_splitters(keys, sums, targets, total, world), dtype=torch.int64, device=keys.device
        )
        cuts: list[int] = torch.searchsorted(keys, splitters).tolist()
        send = [b - a for a, b in pairwise([0, *cuts, len(keys)])]
        receive = exchange_counts(send, world)
        arrived = exchange_rows(keys, send, receive, world)
        if ties is None:
            order = torch.sort(arrived, stable=True).indices
        else:
            order = torch.sort(exchange_rows(ties[leave], send, receive, world), stable=True).indices
            order = order[torch.sort(arrived[order], stable=True).indices]
        before = sum(row[0] for row in all_gather_ints([len(order)], world)[: world.rank])
        places = torch.arange(before, before + len(order), device=keys.device)
        return Ranking(_back(places, order, leave, send, receive, world), world, leave, send, receive, order)

    def before(self, values: Tensor) -> Tensor:
        """The sum of `values` [N] int64 over all ranks' rows that stand before each of this rank's, [N] int64. Every
        rank calls it."""
        there = exchange_rows(values[self._leave], self._send, self._receive, self._world)[self._order]
        sums = there.cumsum(0)
        totals = all_gather_ints([int(sums[-1]) if len(sums) else 0], self._world)
        sums += sum(row[0] for row in totals[: self._world.rank]) - there
        return _back(sums, self._order, self._leave, self._send, self._receive, self._world)


def _back(found: Tensor, order: Tensor, leave: Tensor, send: list[int], receive: list[int], world: World) -> Tensor:
    """What was found of each row, in order, on the rank and in the row that it came from."""
    arrived = torch.empty_like(found).scatter_(0, order, found)
    returned = exchange_rows(arrived, receive, send, world)
    return torch.empty_like(returned).scatter_(0, leave, returned)
