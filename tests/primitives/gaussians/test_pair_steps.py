"""Steps with a capacity for each pair of ranks: an exceeded one costs a step, and local rows cost no bytes."""

from dataclasses import replace

import pytest
import torch

from ns_multigpu.core.exchange.hierarchy import Hierarchy
from ns_multigpu.core.exchange.pair_capacities import Pairs
from tests.primitives.training_runs import RATES, Outcome, TrainingRun, assert_same_run, ordinary, take

CAPACITIES = (1024, 1024, 4096)


def pairs_needed(outcome: Outcome) -> list[list[int]]:
    return [list(map(int, row)) for row in outcome["most"].tolist()]


def as_pairs(table: list[list[int]]) -> Pairs:
    return tuple(tuple(row) for row in table)


@pytest.mark.parametrize(("ranks", "bounds"), [(2, None), (3, (0, 20, 290, 300)), (3, (0, 0, 100, 300))])
def test_each_pair_of_ranks_has_its_own_capacity(ranks: int, bounds: tuple[int, ...] | None) -> None:
    """Just what it needs is enough, one row less for one pair costs a step, and the result is the same to the bit."""
    run = TrainingRun("tile", 2, 3, bounds=bounds, capacities=CAPACITIES, lazy=True)
    plenty = take(run, ranks)
    needed = pairs_needed(plenty[0])
    off = [(a, b) for a in range(ranks) for b in range(ranks) if needed[a][b] > 0 and a != b]
    assert len({n for row in needed for n in row}) > 2, "pairs differ"
    least, most = (choose(off, key=lambda pair: needed[pair[0]][pair[1]]) for choose in (min, max))
    own = max(range(ranks), key=lambda rank: needed[rank][rank])
    for lacking in (None, least, most, (own, own)):
        table = [[*row] for row in needed]
        if lacking is not None:
            table[lacking[0]][lacking[1]] -= 1
        tight = take(replace(run, capacities=(CAPACITIES[0], as_pairs(table), CAPACITIES[2])), ranks)
        for one, other in zip(tight, plenty, strict=True):
            assert int(one["redone"]) == (lacking is not None), "on every rank"
            for name in (*RATES, "losses", "count", "grad2d"):
                assert torch.equal(one[name], other[name]), (lacking, name)
            assert int(one["bytes"]) == int(other["bytes"]), "spare capacity is not sent"


@pytest.mark.parametrize("ranks", [1, 2])
def test_local_rows_are_not_exchanged(ranks: int) -> None:
    """Capacity for local rows costs no bytes. (Every run asserts that all bytes are the predicted ones.)"""
    run = TrainingRun("tile", 2, 2, capacities=CAPACITIES)
    roomy = tuple(tuple(9000 if a == b else 1024 for b in range(ranks)) for a in range(ranks))
    for usual, other in zip(
        take(run, ranks), take(replace(run, capacities=(CAPACITIES[0], roomy, CAPACITIES[2])), ranks), strict=True
    ):
        assert int(usual["bytes"]) == int(other["bytes"]) and (int(usual["bytes"]) > 0) == (ranks > 1)


def test_each_stage_between_machines_has_its_own_capacity() -> None:
    """Four ranks on two machines exchange rows within machines, across, and forwarded. `taken` asserts that each
    step's bytes are the predicted ones."""
    run = TrainingRun("tile", 2, 3, capacities=CAPACITIES, lazy=True, machines=2, captured=True)
    plenty, hierarchy = take(run, 4), Hierarchy(2, 2)
    assert_same_run(run, plenty, ordinary(run))
    needed = pairs_needed(plenty[0])
    assert all(int(one["replayed"]) > 0 for one in plenty)
    inside, across, forwarded = (0, hierarchy.to_rank(1)), (3, hierarchy.to_machine(0)), (1, hierarchy.forwarded(1, 0))
    assert all(needed[rank][number] > 0 for rank, number in (inside, across, forwarded))
    for lacking in (None, across, forwarded):
        table = [[*row] for row in needed]
        if lacking is not None:
            table[lacking[0]][lacking[1]] -= 1
        tight = take(replace(run, capacities=(CAPACITIES[0], as_pairs(table), CAPACITIES[2]), captured=False), 4)
        for one, other in zip(tight, plenty, strict=True):
            assert int(one["redone"]) == (lacking is not None), "on every rank"
            for name in (*RATES, "losses", "count", "grad2d"):
                assert torch.equal(one[name], other[name]), (lacking, name)
