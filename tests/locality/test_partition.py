"""Placement of groups: balanced, with the views that see them, and the same on every run."""

import numpy as np
import pytest
from scipy import sparse

from benchmarks.baselines.placements import at_random, partitioned
from ns_multigpu.locality import metis
from ns_multigpu.locality import partition as module
from ns_multigpu.locality.graph import SeenGraph
from ns_multigpu.locality.partition import Place, PlacedGroups, by_metis, partition, ranges, round_robin
from tests.locality.towns import plain

PLACERS: dict[str, Place] = {"metis": by_metis, "ranges": ranges, "random": at_random, "round_robin": round_robin}


def shares(values: np.ndarray) -> float:
    return float(values.max() / values.mean())


def cross_share(graph: SeenGraph, placed: PlacedGroups) -> float:
    """Return the fraction of what views see that does not lie on the machine where most of it is."""
    by_machine = graph.by_rank(placed.ranks // placed.per_machine, placed.machines)
    return float(1 - by_machine.max(1).sum() / by_machine.sum())


@pytest.mark.parametrize("way", PLACERS)
@pytest.mark.parametrize("machines", [1, 2, 3, 4])
def test_every_rank_has_its_points(way: str, machines: int) -> None:
    graph = plain()
    placed = partition(graph, machines, 4, across=PLACERS[way])
    points = np.bincount(placed.ranks, weights=graph.points, minlength=4 * machines)
    assert shares(points) < (1.5 if way == "ranges" else 1.1)
    assert points.min() > 0


def test_metis_keeps_views_together_and_work_level() -> None:
    graph = plain(32, 400)
    found = {way: partition(graph, 4, 4, across=PLACERS[way]) for way in PLACERS}
    lost = {way: cross_share(graph, one) for way, one in found.items()}
    assert lost["metis"] < 0.5 * lost["random"]
    assert lost["metis"] <= 1.05 * lost["ranges"]
    view_owners = found["metis"].view_machines
    assert shares(np.bincount(view_owners, weights=graph.view_work(), minlength=4)) < 1.25


def test_ranges_are_used_where_metis_would_send_more(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = plain(32, 400)
    assert np.array_equal(partition(graph, 4, 1).ranks, partition(graph, 4, 1, by_metis).ranks)
    monkeypatch.setattr(module, "by_metis", at_random)
    placed = partition(graph, 4, 1)
    assert cross_share(graph, placed) < 1.1 * cross_share(graph, partition(graph, 4, 1, ranges))
    assert shares(np.bincount(placed.ranks, weights=graph.points)) <= 1.06, "levelled"


def test_dealing_levels_each_view_and_metis_does_not() -> None:
    graph = plain(32, 400)

    def worst(within: Place) -> float:
        placed = partition(graph, 2, 4, within=within)
        shown = graph.by_rank(placed.ranks, 8).reshape(-1, 2, 4)
        big = shown[shown.sum(2) > 0.3 * shown.sum((1, 2))[:, None]]
        return float((big.max(1) / big.mean(1)).mean())

    level, random, regions = worst(round_robin), worst(at_random), worst(by_metis)
    assert level < 1.35
    assert level < random < regions
    assert regions > 1.8


def test_points_are_level_even_where_work_is_in_one_corner() -> None:
    """Two kinds of weight: the sum of both could be level with half the points on one rank."""
    graph = plain(24, 60, across=4)
    rows = np.repeat(graph.seen[:5].toarray(), 100, axis=0)
    crowded = SeenGraph(sparse.csr_matrix(np.concatenate([graph.seen.toarray(), rows])), graph.points)
    placed = partition(crowded, 4, 1)
    assert shares(np.bincount(placed.ranks, weights=crowded.points)) <= 1.06


def test_levelling_moves_what_loses_least() -> None:
    graph = plain(16, 100)
    of = partition(graph, 4, 1).ranks
    crowded = np.where(of == 3, 0, of)
    module._level(graph, crowded, partition(graph, 4, 1).view_machines, 4, 1.05)  # pyright: ignore[reportPrivateUsage]
    held = np.bincount(crowded, minlength=4)
    assert held.max() <= 1.05 * 64 + 1 and held.min() > 0
    assert (crowded == of).mean() > 0.8, "they went back to where their views are"


def test_the_same_graph_is_placed_the_same() -> None:
    graph = plain()
    for place in PLACERS.values():
        assert np.array_equal(partition(graph, 2, 2, place).ranks, partition(graph, 2, 2, place).ranks)


def test_images_are_held_where_most_of_their_view_is() -> None:
    graph = plain()
    placed = partition(graph, 3, 2)
    shown = graph.by_rank(placed.ranks, 6).reshape(-1, 3, 2).sum(2)
    assert np.array_equal(placed.view_machines, shown.argmax(1))


def test_ranges_replace_metis_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missing", lambda: "pymetis cannot be imported (no such thing): `pip install pymetis`")
    graph = plain()
    placed = partition(graph, 2, 4, by_metis)
    assert len(placed.notes) == 1 and "pip install pymetis" in placed.notes[0] and "Z-order" in placed.notes[0]
    assert np.array_equal(placed.ranks // 4, partition(graph, 2, 4, across=ranges).ranks // 4)


def test_a_pymetis_that_hides_its_library_serves_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "_library", lambda: (None, 64, {}))
    graph = plain()
    placed = partition(graph, 4, 1)
    assert "sum of points and work" in placed.notes[0]
    assert shares(np.bincount(placed.ranks, weights=graph.points)) < 1.1
    assert cross_share(graph, placed) < 0.6 * cross_share(graph, partition(graph, 4, 1, at_random))


@pytest.mark.parametrize("way", PLACERS)
def test_as_many_ranks_as_groups(way: str) -> None:
    graph = plain(4, 20)
    placed = partition(graph, 4, 4, across=PLACERS[way])
    assert sorted(placed.ranks.tolist()) == list(range(16))
    with pytest.raises(ValueError, match="17 ranks for 16 groups"):
        partition(graph, 17, 1, across=PLACERS[way])


def test_flat_and_one_rank() -> None:
    graph = plain()
    assert partition(graph, 1, 1).ranks.tolist() == [0] * graph.groups
    flat = partitioned(graph, 2, 4, hierarchical=False)
    assert set(flat.ranks.tolist()) == set(range(8)) and (flat.machines, flat.per_machine) == (2, 4)
    assert set(flat.view_machines.tolist()) == {0, 1}


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="at least one of each"):
        partition(plain(4, 20), 0, 2)
