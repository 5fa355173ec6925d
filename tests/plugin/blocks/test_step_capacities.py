"""`StepCapacities`: capacities for views of very different demand, with few retried steps."""

from itertools import product

import pytest

from ns_multigpu.core.exchange.pair_capacities import alike, most_of, pairs_of
from ns_multigpu.core.step.step_settings import padded
from ns_multigpu.plugin.blocks.step_capacities import Capacities, StepCapacities

BLOCK = 50


def three(rows: int, segment: int, intersections: int) -> Capacities:
    """Return equal capacities for all pairs of two ranks."""
    return rows, pairs_of(segment, 2), intersections


def taken_again(needs: list[int], views: int) -> tuple[int, StepCapacities]:
    """Return the number of blocks of `BLOCK` steps of one image in which a view exceeded the capacities."""
    capacities, failures = StepCapacities(views), 0
    capacities.begin(three(padded(1000), padded(500), padded(2000)))
    for start in range(0, len(needs), BLOCK):
        block = needs[start : start + BLOCK]
        while True:
            assert capacities.now is not None
            fitting = next((k for k, need in enumerate(block) if need > capacities.now[0]), len(block))
            seen = block[: fitting + 1]
            capacities.learn(three(max(seen), max(seen) // 2, 2 * max(seen)), fitting < len(block), fitting)
            if fitting == len(block):
                break
            failures += 1
            block = block[fitting:]
    return failures, capacities


def test_a_rare_large_view_costs_one_step_and_not_one_an_epoch() -> None:
    epoch = [20_000] * 99 + [400_000]
    failures, capacities = taken_again(epoch * 60, views=100)
    assert failures <= 3
    assert capacities.now is not None and capacities.now[0] >= 400_000


@pytest.mark.parametrize("views", [40, 2000])
def test_unused_capacity_is_released_once_all_views_were_seen(views: int) -> None:
    needs = [400_000] * BLOCK + [40_000] * (2 * max(views, 500))
    failures, capacities = taken_again(needs, views)
    assert failures <= 3
    assert capacities.now is not None and 40_000 <= capacities.now[0] < 100_000
    _, early = taken_again(needs[: 10 * BLOCK], views)
    assert early.now is not None and early.now[0] >= 400_000


def test_oversized_initial_capacity_shrinks_at_once() -> None:
    capacities = StepCapacities(1000)
    capacities.begin(three(padded(4_000_000), padded(4_000_000), padded(8_000_000)))
    capacities.learn(three(30_000, 15_000, 60_000), False, BLOCK)
    assert capacities.now is not None
    rows, pairs, intersections = capacities.now
    assert max(rows, most_of(pairs), intersections) < 100_000


@pytest.mark.parametrize("which", [0, 1, 2])
def test_exceeded_capacity_grows_independent_of_earlier_demand(which: int) -> None:
    """And the others stay as they are."""
    capacities = StepCapacities(10)
    begun, needed = [4096, 5120, 6144], [1000, 1500, 3000]
    needed[which] = 10_000
    capacities.begin(three(*begun))
    capacities.learn(three(*needed), True, 0)
    assert capacities.now is not None
    (rows, pairs, intersections), expected = capacities.now, list(three(*begun))
    least = 10_000 if which == 1 else 20_000
    assert (rows, most_of(pairs), intersections)[which] >= least and pairs == alike(pairs)
    expected[which] = capacities.now[which]
    assert capacities.now == tuple(expected)


def test_each_pair_has_what_it_needs_itself() -> None:
    """A matrix of very unequal pairs: one that is exceeded grows alone; one that is far too large shrinks alone."""
    capacities = StepCapacities(10)
    begun = tuple(tuple(200_000 if a == b else 2048 * (1 + a + b) for b in range(3)) for a in range(3))
    capacities.begin((4096, begun, 4096))
    needed = [[150_000 if a == b else 1000 for b in range(3)] for a in range(3)]
    needed[2][0] = 50_000
    capacities.learn((3000, tuple(map(tuple, needed)), 3000), True, 0)
    assert capacities.now is not None
    for a, b in product(range(3), repeat=2):
        now = capacities.now[1][a][b]
        assert now == padded(50_000) if (a, b) == (2, 0) else now == begun[a][b]
    needed[2][0], needed[1][1] = 60_000, 10_000
    for _ in range(50):  # until all views have been seen, and no block that needed more is remembered
        capacities.learn((3000, tuple(map(tuple, needed)), 3000), False, BLOCK)
    assert capacities.now[0] == capacities.now[2] == 4096
    for a, b in product(range(3), repeat=2):
        now = capacities.now[1][a][b]
        assert now < 20_000 if (a, b) == (1, 1) else now >= min(needed[a][b], begun[a][b])
    assert capacities.now[1][0][0] == begun[0][0] and capacities.now[1][2][0] >= 60_000


def test_pairs_are_doubled_where_not_all_rows_were_counted() -> None:
    capacities = StepCapacities(10)
    capacities.begin((4096, pairs_of(2048, 2), 4096))
    capacities.learn((5000, pairs_of(3000, 2), 3000), True, 0)
    assert capacities.now is not None and most_of(capacities.now[1]) == 2 * padded(3000)


def test_equal_segments_have_the_capacity_of_the_largest_pair() -> None:
    capacities = StepCapacities(10, one_for_all=True)
    capacities.begin((4096, pairs_of(2048, 2), 4096))
    capacities.learn((3000, ((500, 9000), (20, 1)), 3000), True, 0)
    assert (
        capacities.now is not None
        and capacities.now[1] == alike(capacities.now[1])
        and most_of(capacities.now[1]) >= 18_000
    )


def test_steps_that_wait_for_a_flush_change_nothing() -> None:
    capacities = StepCapacities(10)
    capacities.begin(three(10_240, 2048, 40_960))
    capacities.learn(three(5000, 1500, 3000), True, 0)
    assert capacities.now == three(10_240, 2048, 40_960)


def test_nearly_exhausted_capacity_grows_when_steps_are_rebuilt() -> None:
    """Capacities of rows and intersections grow up to a bound; those of padded messages do not."""
    capacities = StepCapacities(10)
    capacities.spare()
    assert capacities.now is None, "there is none yet"
    capacities.begin(three(padded(10_000), padded(10_000), 9 * padded(20_000) // 8))
    capacities.learn(three(10_000, 10_000, 20_000), False, BLOCK)
    capacities.spare()
    assert capacities.now == (2 * padded(10_000), pairs_of(padded(10_000), 2), 9 * padded(20_000) // 8)
    capacities.spare(12, 12)
    assert capacities.now[2] == padded(20_000) * 12 // 8 and capacities.now[1] == pairs_of(padded(10_000), 2)
    capacities.spare(pairs=True)
    assert capacities.now[1] == pairs_of(12 * padded(10_000) // 8, 2)
    capacities.begin(three(padded(10_000), padded(10_000), padded(20_000)))
    capacities.learn(three(10_000, 10_000, 20_000), False, BLOCK)
    capacities.spare(rows=False)
    assert capacities.now == (padded(10_000), pairs_of(padded(10_000), 2), 2 * padded(20_000))
    capacities.begin(three(padded(8_000_000), 1024, 9 * padded(100) // 8))
    capacities.learn(three(8_000_000, 10, 100), False, BLOCK)
    capacities.spare()
    assert capacities.now[0] == padded(8_000_000) + (1 << 20)


def test_growing_model_retries_few_blocks() -> None:
    """Demand grows by a twentieth per block. Every fifth block rebuilds steps, as storage has a quarter to spare."""

    def again(spares: bool) -> tuple[int, int]:
        capacities, failures, need = StepCapacities(100), 0, 20_000.0
        made = set[Capacities]()
        capacities.begin(three(padded(20_000), padded(10), padded(40_000)))
        for block in range(60):
            assert capacities.now is not None
            needed = three(int(need), 5, 2 * int(need))
            full = needed[0] > capacities.now[0] or needed[2] > capacities.now[2]
            failures += full
            capacities.learn(needed, full, 0 if full else BLOCK)
            if spares and block % 5 == 4:
                capacities.spare()
            made.add(capacities.now)
            need *= 1.05
        return failures, len(made)

    (without, _), (failures, made) = again(spares=False), again(spares=True)
    assert without >= 3 and failures == 0
    assert made <= 8, "shared buffers are slow to make: a model that grows by a factor of 18 makes few"


def test_rows_and_intersections_have_a_minimum_capacity() -> None:
    capacities = StepCapacities(10, least=(5_000, 70_000))
    assert capacities.now is None
    capacities.begin(three(1024, 1024, 100_000))
    assert capacities.now == (5_000, pairs_of(1024, 2), 100_000)
    for _ in range(20):
        capacities.learn(three(10, 10, 20), False, 2 * BLOCK)
    assert capacities.now == (5_000, pairs_of(1024, 2), 70_000), "also when capacities shrink"
    capacities.learn(three(6_000, 10, 20), True, BLOCK)
    assert capacities.now[0] == 2 * padded(6_000)
