"""`Pace`: how long a step takes, where blocks of steps differ in length."""

import pytest

from ns_multigpu.plugin.blocks.timing import Pace


def test_a_short_block_with_a_refinement_counts_by_its_steps() -> None:
    pace = Pace(steps=100)
    for _ in range(6):
        for steps, seconds in ((49, 0.049), (50, 0.050), (1, 0.041)):
            now = pace.after(steps, seconds)
    assert now == pytest.approx(0.0014)


def test_it_follows_what_changes() -> None:
    pace = Pace(steps=100)
    for _ in range(10):
        pace.after(50, 0.05)
    for _ in range(3):
        now = pace.after(50, 0.5)
    assert now == pytest.approx(0.01)
    assert Pace().after(64, 0.64) == pytest.approx(0.01)
