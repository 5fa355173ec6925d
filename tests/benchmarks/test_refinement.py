"""Number of collectives in a refinement."""

import pytest

from benchmarks.scaling.refinement import refine
from ns_multigpu.core.dist.world import World
from tests.lib.ranks import run_ranks


def meetings(world: World, kind: str) -> dict[str, list[int]]:
    return {way: [met for _, met in found] for way, found in refine(kind, 600, world, 10).items()}


@pytest.mark.parametrize(("kind", "unordered", "ordered"), [("grows", 3, 13), ("splits", 1, 12)])
def test_ranks_exchange_rarely_when_children_follow_parents(kind: str, unordered: int, ordered: int) -> None:
    for found in run_ranks(meetings, 2, kind):
        assert found["unordered"][1:] == [unordered] * 8, (
            "behind the first, which may ask how many points each rank has"
        )
        assert len(found["ordered"]) == 1 and found["ordered"][0] <= ordered
