"""Global order of rows that are distributed over ranks: each row's position among all ranks' rows, and sums before it.

Keys are sent to ranks that hold equal ranges of them, and sorted there. Results return to the keys' ranks. A rank
exchanges a few numbers for each of its own rows; no rank holds all rows.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_ints, all_gather_ints_on_device, exchange_rows
from ns_multigpu.core.dist.world import World

_SAMPLES = 64
"""Keys of each rank that the ranges are cut by."""


@dataclass(frozen=True)
class GlobalOrder:
    """All ranks' rows in one order, this rank's among them.

    Attributes:
        places: [N] int64, how many of all ranks' rows stand before each of this rank's.
    """

    places: Tensor
    _world: World
    _send_order: Tensor | None
    _send: list[int]
    _receive: list[int]
    _order: Tensor

    @staticmethod
    def of(keys: Tensor, world: World, ties: Tensor | None = None, *, ascending: bool = False) -> "GlobalOrder":
        """Return the order by key, then tie, then rank and row. Every rank calls it.

        Args:
            keys: [N] int64 in [0, 2^62), in any order.
            ties: [N] int64; None where keys are never equal, or by rank and row if they are.
            ascending: whether the keys of each rank are ascending.
        """
        send_order = None
        if not ascending:
            keys, send_order = torch.sort(keys, stable=True)
        cuts: list[int] = torch.searchsorted(keys, _splitters(keys, world)).tolist()
        send = [b - a for a, b in pairwise([0, *cuts, len(keys)])]
        table = all_gather_ints_on_device(send, world)
        receive = [row[world.rank] for row in table]
        keys, order = torch.sort(exchange_rows(keys, send, receive, world), stable=True)
        if ties is not None:
            ties = exchange_rows(ties if send_order is None else ties[send_order], send, receive, world)
            order = _by_ties(keys, order, ties)
        before = sum(sum(row[: world.rank]) for row in table)
        places = torch.arange(before, before + len(order), device=keys.device)
        return GlobalOrder(
            _back(places, order, send_order, send, receive, world), world, send_order, send, receive, order
        )

    def before(self, values: Tensor) -> Tensor:
        """Return, for each of this rank's rows, the sum of `values` [N] int64 over all ranks' rows before it, [N]
        int64. Every rank calls it."""
        outgoing = values if self._send_order is None else values[self._send_order]
        there = exchange_rows(outgoing, self._send, self._receive, self._world)[self._order]
        sums = there.cumsum(0)
        totals = all_gather_ints([int(sums[-1]) if len(sums) else 0], self._world)
        sums += sum(row[0] for row in totals[: self._world.rank]) - there
        return _back(sums, self._order, self._send_order, self._send, self._receive, self._world)


def _splitters(keys: Tensor, world: World) -> Tensor:
    """Return [ranks - 1] int64 keys, ascending and equal on all ranks, that split all ranks' keys into about equal
    numbers.

    `keys` [N] are ascending on each rank. The order does not depend on the splitters: one rank gets all equal keys.
    """
    if len(keys) and world.size > 1:
        sample = keys[(torch.arange(_SAMPLES, device=keys.device) * 2 + 1) * len(keys) // (2 * _SAMPLES)].tolist()
    else:
        sample = [0] * _SAMPLES
    everyone = all_gather_ints_on_device([len(keys), *sample], world)
    # Each key of a rank's sample stands for equally many of its own.
    pool = sorted((key, row[0]) for row in everyone for key in row[1:] if row[0])
    upto, total = list(accumulate(count for _, count in pool)), sum(count for _, count in pool)
    at = [bisect_left(upto, total * rank / world.size) for rank in range(1, world.size)]
    return torch.tensor([pool[k][0] if pool else 0 for k in at], dtype=torch.int64, device=keys.device)


def _by_ties(keys: Tensor, order: Tensor, ties: Tensor) -> Tensor:
    """Return `order` [N] of sorted keys [N] with rows of equal keys sorted by their ties [N]. Equal keys are rare."""
    equal = keys[1:] == keys[:-1]
    among = torch.nn.functional.pad(equal, (1, 0)) | torch.nn.functional.pad(equal, (0, 1))
    places = among.nonzero().flatten()
    rows = order[places]
    by_tie = torch.sort(ties[rows], stable=True).indices
    return order.index_copy(0, places, rows[by_tie[torch.sort(keys[places][by_tie], stable=True).indices]])


def _back(
    found: Tensor, order: Tensor, send_order: Tensor | None, send: list[int], receive: list[int], world: World
) -> Tensor:
    """Return the values of ordered rows to their source ranks and rows."""
    unsorted = torch.empty_like(found).scatter_(0, order, found)
    returned = exchange_rows(unsorted, receive, send, world)
    return returned if send_order is None else torch.empty_like(returned).scatter_(0, send_order, returned)
