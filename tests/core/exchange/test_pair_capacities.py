"""Capacities of pairs of ranks, and exchanges whose parts differ by pair."""

from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.collectives import all_to_all_parts
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.pair_capacities import alike, all_gather_counts, most_of, pairs_of
from tests.lib.ranks import run_ranks

PAIRS = ((1000, 2, 30), (400, 5000, 6), (0, 80, 90_000))


def test_one_for_all_or_each_its_own() -> None:
    assert pairs_of(7, 2) == ((7, 7), (7, 7)) and pairs_of(PAIRS, 3) == PAIRS
    assert most_of(PAIRS) == 90_000 and alike(((1, 2), (3, 4))) == pairs_of(4, 2)
    for wrong, ranks in ((PAIRS, 2), (((1, 2), (3,)), 2), ((), 1)):
        with pytest.raises(ValueError, match=f"for {ranks} ranks; give {ranks} x {ranks}"):
            pairs_of(wrong, ranks)
    with pytest.raises(ValueError, match="not be negative"):
        pairs_of(-1, 1)


def exchange_rows(world: World) -> dict[str, Any]:
    """Number s + 10 d of every rank s to every other d, PAIRS of each."""
    me, ranks = world.rank, range(world.size)
    send, receive = ([0 if r == me else (PAIRS[me][r], PAIRS[r][me])[k] for r in ranks] for k in (0, 1))
    x = torch.cat([torch.full((send[r],), me + 10 * r, dtype=torch.int32) for r in ranks])
    out = torch.full((sum(receive),), -1, dtype=torch.int32)
    all_to_all_parts(out, x, receive, send, world)
    wrong = []
    for sizes in ((send, [1, *receive[1:]]), ([*send, 0], receive), (receive, receive)):
        with pytest.raises(ValueError, match="which keeps its own"):
            all_to_all_parts(out, x, sizes[1], sizes[0], world)
        wrong.append(True)
    return {"out": out, "sent": world.traffic.sent, "pairs": all_gather_counts(PAIRS[me], world), "refused": len(wrong)}


def test_parts_of_their_own_size_for_each_pair() -> None:
    for rank, found in enumerate(run_ranks(exchange_rows, 3)):
        others = [r for r in range(3) if r != rank]
        expected = [torch.full((PAIRS[r][rank],), r + 10 * rank) for r in others]
        assert torch.equal(found["out"], torch.cat(expected).int())
        assert found["sent"] == 4 * sum(PAIRS[rank][r] for r in others)
        assert found["pairs"] == PAIRS and found["refused"] == 3


def test_single_rank_sends_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    world = World.single()
    all_to_all_parts(none, none, [0], [0], world)
    assert world.traffic.sent == 0 and all_gather_counts([5], world) == ((5,),)
