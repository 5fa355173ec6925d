"""`StepCapacities`: room for what views of one capture need, which differ widely, without taking steps twice."""

import pytest

from ns_multigpu.core.step_settings import padded
from ns_multigpu.plugin.blocks.step_capacities import StepCapacities

BLOCK = 50


def taken_again(needs: list[int], views: int) -> tuple[int, StepCapacities]:
    """Blocks of `BLOCK` steps, each of one image: how many of them met a view that there was no room for."""
    room, failures = StepCapacities(views), 0
    room.begin((padded(1000), padded(500), padded(2000)))
    for start in range(0, len(needs), BLOCK):
        block = needs[start : start + BLOCK]
        while True:
            assert room.now is not None
            fitting = next((k for k, need in enumerate(block) if need > room.now[0]), len(block))
            seen = block[: fitting + 1]
            room.learn((max(seen), max(seen) // 2, 2 * max(seen)), fitting < len(block), fitting)
            if fitting == len(block):
                break
            failures += 1
            block = block[fitting:]
    return failures, room


def test_a_rare_large_view_costs_one_step_and_not_one_an_epoch() -> None:
    epoch = [20_000] * 99 + [400_000]
    failures, room = taken_again(epoch * 60, views=100)
    assert failures <= 3
    assert room.now is not None and room.now[0] >= 400_000


@pytest.mark.parametrize("views", [40, 2000])
def test_room_that_no_view_needs_is_given_up_once_all_have_been_seen(views: int) -> None:
    needs = [400_000] * BLOCK + [40_000] * (2 * max(views, 500))
    failures, room = taken_again(needs, views)
    assert failures <= 3
    assert room.now is not None and 40_000 <= room.now[0] < 100_000
    _, early = taken_again(needs[: 10 * BLOCK], views)
    assert early.now is not None and early.now[0] >= 400_000


def test_a_first_guess_far_too_large_goes_at_once() -> None:
    room = StepCapacities(1000)
    room.begin((padded(4_000_000), padded(4_000_000), padded(8_000_000)))
    room.learn((30_000, 15_000, 60_000), False, BLOCK)
    assert room.now is not None and max(room.now) < 100_000


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_full_capacity_grows_whatever_was_needed_before(which: int) -> None:
    """And the others stay as they are."""
    room = StepCapacities(10)
    begun, needed = [4096, 5120, 6144], [1000, 1500, 3000]
    needed[which] = 10_000
    room.begin((begun[0], begun[1], begun[2]))
    room.learn((needed[0], needed[1], needed[2]), True, 0)
    assert room.now is not None and room.now[which] >= 20_000
    assert [room.now[k] for k in range(3) if k != which] == [begun[k] for k in range(3) if k != which]


def test_steps_that_wait_for_a_flush_change_nothing() -> None:
    room = StepCapacities(10)
    room.begin((10_240, 2048, 40_960))
    room.learn((5000, 1500, 3000), True, 0)
    assert room.now == (10_240, 2048, 40_960)
