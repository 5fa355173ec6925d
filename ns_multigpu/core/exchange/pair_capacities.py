"""Capacities in rows of each pair of ranks.

Each pair has a capacity of its own, which the host knows before the step. The device counts the rows.
"""

from collections.abc import Sequence
from typing import TypeAlias

from ns_multigpu.core.dist.collectives import all_gather_ints_on_device
from ns_multigpu.core.dist.world import World

Pairs: TypeAlias = tuple[tuple[int, ...], ...]
"""Numbers of rows [source][destination]; the diagonal is local."""


def pairs_of(capacity: int | Pairs, ranks: int, numbers: int = 0) -> Pairs:
    """Return the capacity of each pair.

    Args:
        capacity: one for all pairs, or [source][destination].
        numbers: per source, if not one for each rank (`Hierarchy.num_counts`).

    Raises:
        ValueError: the table's shape is wrong, or a number is negative.
    """
    numbers = numbers or ranks
    table = ((capacity,) * numbers,) * ranks if isinstance(capacity, int) else capacity
    if len(table) != ranks or any(len(row) != numbers for row in table):
        raise ValueError(
            f"capacities of pairs: {[len(row) for row in table]} numbers by source, for {ranks} ranks; give "
            f"{ranks} x {numbers}, or one number for all."
        )
    if any(number < 0 for row in table for number in row):
        raise ValueError(f"capacities of pairs must not be negative; got {[list(row) for row in table]}.")
    return table


def most_of(pairs: Pairs) -> int:
    """Return the largest number; 0 if there is none."""
    return max((number for row in pairs for number in row), default=0)


def alike(pairs: Pairs) -> Pairs:
    """Return the same shape with the largest number everywhere."""
    return pairs_of(most_of(pairs), len(pairs), len(pairs[0]))


def all_gather_counts(counts: Sequence[int], world: World) -> Pairs:
    """Return every rank's counts: row r is rank r's `counts`. Collective; waits for the device."""
    return tuple(tuple(row) for row in all_gather_ints_on_device(counts, world))
