"""Placements and assignments that `locality`'s are compared with: one part of Gaian's scheme left out at a time."""

from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.locality.assign import BETWEEN, Assigner
from ns_multigpu.locality.graph import SeenGraph
from ns_multigpu.locality.partition import IMBALANCE, Place, PlacedGroups, by_metis, partition, ranges, round_robin

Ints = NDArray[np.int64]
Way = Literal["metis", "round_robin", "random", "ranges"]
UNBALANCED = 1.5
"""The most points of a machine over the mean where balance is left out."""


def at_random(graph: SeenGraph, parts: int, notes: list[str], seed: int = 0) -> Ints:
    """Place equally many groups on each part, drawn at random."""
    return np.random.default_rng(seed).permutation(np.arange(graph.groups, dtype=np.int64) % parts)


def partitioned(
    graph: SeenGraph, machines: int, per_machine: int, across: Way = "metis", within: Way = "round_robin",
    *, hierarchical: bool = True, balance: bool = True,
) -> PlacedGroups:  # fmt: skip
    """Place groups as `locality.partition.partition` does, with other ways, or on all ranks at once.

    Args:
        graph: groups and the views that see them. machines, per_machine: ranks are machines * per_machine.
        across: how on machines. within: how on a machine's ranks.
        hierarchical: machines first; else `across` places on all ranks at once, as if every link were alike.
        balance: keep machines within 5 % of the mean; else within half.
    """
    places: dict[Way, Place] = {
        "metis": partial(by_metis, imbalance=IMBALANCE if balance else UNBALANCED),
        "round_robin": round_robin, "ranges": ranges, "random": at_random,
    }  # fmt: skip
    if hierarchical:
        return partition(graph, machines, per_machine, places[across], places[within])
    flat = partition(graph, machines * per_machine, 1, places[across])
    owners = graph.by_rank(flat.ranks // per_machine, machines).argmax(1).astype(np.int64)
    return PlacedGroups(flat.ranks, owners, machines, per_machine, flat.notes)


def assigner(machines: int, per_machine: int, *, hierarchical: bool = True, search: bool = True) -> Assigner:
    """Return `locality`'s assigner, without the machines' level or without the search that levels loads."""
    whole = hierarchical or machines == 1
    made = Assigner(machines, per_machine) if whole else Assigner(1, machines * per_machine, within=BETWEEN)
    return made if search else replace(made, most_swaps=0)


def random_assignment(patches: int, ranks: int, generator: np.random.Generator) -> Ints:
    """Assign patches at random, equally many to each rank, as gsplat assigns whole images."""
    return generator.permutation(np.arange(patches, dtype=np.int64) % ranks)
