"""Ownership of groups of points: over machines first, then over each machine's GPUs (section 4.2.1).

Groups are placed on the machines of the views that show them. METIS cuts the graph of groups and views, with points
balanced for memory and visible points for work. A view then needs few machines. Ranges of the Z-order replace that cut
where they send less. Within a machine a view's points would be unbalanced: METIS cuts regions, so one GPU would have
most of a view's work. So within a machine, where links are fast, groups are distributed. Of each run of neighbours
along the Z-order every GPU gets one group. The choice keeps every view's points balanced over the GPUs (least sum of
squares over views, run by run). All GPUs hold equally many groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import scipy  # its parts are loaded when they are first asked for
import torch
from numpy.typing import NDArray

from cuda_ext.ops.exchange.assign_patches import assign_patches
from ns_multigpu.locality.graph import SeenGraph
from ns_multigpu.locality.metis import missing, part_graph

Ints = NDArray[np.int64]
_SEED = 0
"""Of METIS."""
IMBALANCE = 1.05
"""The most of points, and of points seen, that a machine has over the mean. METIS only tries to keep the latter."""
Place: TypeAlias = "Callable[[SeenGraph, int, list[str]], Ints]"
"""Place a graph's groups on so many parts: [C] int64, the part of each. What was not done as asked is added to the
notes."""


@dataclass(frozen=True)
class PlacedGroups:
    """Owners of groups and views. Ranks of a machine are consecutive.

    Attributes:
        ranks: [C] int64, the rank that owns each group.
        view_machines: [V] int64, the machine whose groups a view sees most of: where its image is decoded and held.
        machines, per_machine: how many, and ranks of each.
        notes: what was not done as asked, for the log.
    """

    ranks: Ints
    view_machines: Ints
    machines: int
    per_machine: int
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Ranks in all."""
        return self.machines * self.per_machine


def _fill_empty_ranks(of: Ints, ranks: int) -> None:
    """Move a group from the largest rank to each rank without groups. Balancing may leave ranks empty if groups are
    few."""
    held = np.bincount(of, minlength=ranks)
    for rank in np.flatnonzero(held == 0):
        most = int(held.argmax())
        of[np.flatnonzero(of == most)[-1]] = rank
        held[most] -= 1
        held[rank] += 1


def by_metis(graph: SeenGraph, parts: int, notes: list[str], imbalance: float = IMBALANCE) -> Ints:
    """Place groups by METIS on the graph of groups and views; by `ranges` where METIS cannot be loaded."""
    if problem := missing():
        notes.append(f"{problem}. Until then groups are placed by ranges of the Z-order with equal work.")
        return ranges(graph, parts, notes)
    # Vertices: groups, then views. Kinds of weight: points of groups, points seen by views.
    seen, turned = graph.seen, graph.seen.T.tocsr()
    groups, views = graph.groups, graph.views
    starts = np.concatenate([turned.indptr.astype(np.int64), turned.nnz + seen.indptr[1:].astype(np.int64)])
    neighbours = np.concatenate([turned.indices.astype(np.int64) + groups, seen.indices.astype(np.int64)])
    edges = np.concatenate([turned.data, seen.data])
    weights = np.zeros((groups + views, 2), dtype=np.int64)
    weights[:groups, 0], weights[groups:, 1] = graph.points, graph.view_work()
    found = part_graph(starts, neighbours, weights, edges, parts, imbalance, _SEED)
    if found.note:
        notes.append(found.note)
    of = found.of[:groups].copy()
    _level(graph, of, found.of[groups:], parts, imbalance)
    return of


def _level(graph: SeenGraph, of: Ints, views: Ints, parts: int, imbalance: float) -> None:
    """Move groups, those that lose least, until no part has more points than it may: METIS only tries."""
    held = np.bincount(of, weights=graph.points, minlength=parts)
    most = max(imbalance * held.sum() / parts, held.sum() / parts + graph.points.max())
    if held.max() <= most and held.min() > 0:
        return
    work_by_part = SeenGraph(graph.seen.T.tocsr(), graph.view_work()).by_rank(
        views, parts
    )  # what part's views see of a group
    for full in np.argsort(-held, kind="stable"):
        while held[full] > most or held.min() == 0:
            if held[full] <= most and full != held.argmax():
                break
            to = int(held.argmin())
            members = np.flatnonzero(of == full)
            loss = work_by_part[members, full] - work_by_part[members, to]
            wanted = max(1, int((held[full] - most) / graph.points.max()))
            spare = max(1, int((most - held[to]) / graph.points.max()))
            for group in members[np.argsort(loss, kind="stable")][: min(wanted, spare)]:
                of[group] = to
                held[full] -= graph.points[group]
                held[to] += graph.points[group]


def ranges(graph: SeenGraph, parts: int, notes: list[str]) -> Ints:
    """Place groups by ranges of the Z-order with equal work: half by points, half by visible points."""
    work = graph.points / max(1, graph.points.sum()) + graph.group_work() / max(1, graph.group_work().sum())
    middle = np.cumsum(work) - work / 2
    places = np.arange(graph.groups)
    of = np.minimum((middle / work.sum() * parts).astype(np.int64), places)
    # Every part gets some: from group to group at most one part further, and as many groups left as parts.
    of = np.minimum.accumulate(np.minimum(of, parts - 1) - places) + places
    return np.maximum(of, parts - (graph.groups - places))


def least_sent(graph: SeenGraph, parts: int, notes: list[str]) -> Ints:
    """Place groups by METIS, or by balanced ranges where views then need fewer points from other parts.

    Every part draws equally many views, as in a step.
    """

    def local(of: Ints) -> float:
        counts = torch.from_numpy(graph.by_rank(of, parts))
        return float(counts.gather(1, assign_patches(counts, most_swaps=0).ranks[:, None]).sum())

    level = ranges(graph, parts, notes)
    _level(graph, level, graph.by_rank(level, parts).argmax(1), parts, IMBALANCE)
    return max(by_metis(graph, parts, notes), level, key=local)


def round_robin(graph: SeenGraph, parts: int, notes: list[str]) -> Ints:
    """Distribute groups so that views stay balanced: each run of `parts` neighbours gives one group to every part."""
    by_group = graph.seen.T.tocsr()
    starts, views = by_group.indptr, by_group.indices
    counts = by_group.data / np.maximum(graph.view_work(), 1)[views]  # a view counts as much as another
    load = np.zeros((graph.views, parts))
    of = np.zeros(graph.groups, dtype=np.int64)
    for first in range(0, graph.groups, parts):
        run = range(first, min(first + parts, graph.groups))
        edges = [slice(starts[group], starts[group + 1]) for group in run]
        cost = np.stack([counts[edge] @ load[views[edge]] for edge in edges])
        # As cards, where views say nothing; the last run is short: it goes to those with least.
        rows, columns = scipy.optimize.linear_sum_assignment(cost)
        for row, column in zip(rows, columns, strict=True):
            load[views[edges[row]], column] += counts[edges[row]]
            of[first + row] = column
    return of


def partition(
    graph: SeenGraph, machines: int, per_machine: int, across: Place = least_sent, within: Place = round_robin
) -> PlacedGroups:
    """Place groups on machines, then each machine's groups on its ranks.

    On one machine the same graph gives the same result. METIS promises nothing for machines of different kinds, so one
    rank should place for all.

    Args:
        graph: groups in the Z-order, and the views that see them.
        machines, per_machine: ranks are machines * per_machine.
        across: places on machines. within: places on a machine's ranks.

    Raises:
        ValueError: more ranks than groups.
    """
    ranks = machines * per_machine
    if machines < 1 or per_machine < 1:
        raise ValueError(f"{machines} machines of {per_machine} ranks: at least one of each is needed")
    if ranks > graph.groups:
        raise ValueError(
            f"{ranks} ranks for {graph.groups} groups of points: choose smaller groups, fewer ranks or a larger model"
        )
    notes: list[str] = []
    of = _on_parts(graph, machines, across, notes)
    owner = np.empty_like(of)
    for machine in range(machines):
        members = np.flatnonzero(of == machine)
        owner[members] = machine * per_machine + _on_parts(graph.part(members), per_machine, within, notes)
    _fill_empty_ranks(owner, ranks)
    view_machines = graph.by_rank(owner // per_machine, machines).argmax(1).astype(np.int64)
    return PlacedGroups(owner, view_machines, machines, per_machine, tuple(dict.fromkeys(notes)))


def _on_parts(graph: SeenGraph, parts: int, place: Place, notes: list[str]) -> Ints:
    return np.zeros(graph.groups, dtype=np.int64) if parts == 1 else place(graph, parts, notes)
