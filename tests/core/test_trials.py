"""Ways to take steps are tried, and the fastest stays: with times that are made up."""

from collections.abc import Mapping

import pytest

from ns_multigpu.core.trials import FIRST, MOST, PROOF, TIMED, WARM, Block, Trials

WAYS = ("mixed", "pixels", "splats")
FAST_LINKS = {"mixed": 8.8, "pixels": 7.5, "splats": 12.0}
"""Milliseconds a step."""


class Run:
    """A run whose steps take as long as they are said to."""

    def __init__(self, trials: Trials | None = None, taken: int = 0) -> None:
        self.trials = trials or Trials(WAYS, 2, "pixels")
        self.taken, self.points, self.placings, self.ready = taken, 1000, 3, True
        self.seconds, self.ways = 0.0, list[str]()
        self.told: list[str] = []

    def take(self, steps: int, times: Mapping[str, float], again: bool = False, spare: bool = True) -> None:
        """Takes so many steps, in blocks as long as a run's."""
        end = self.taken + steps
        while self.taken < end:
            block = min(self.trials.most or 64, end - self.taken)
            self.ways += [self.trials.way] * block
            seconds = block * times[self.trials.way] / 1e3
            self.taken, self.seconds = self.taken + block, self.seconds + seconds
            told = self.trials.after(
                Block(block, self.taken, seconds, self.points, self.placings, again, self.ready), lambda: spare
            )
            self.told += [told] if told else []


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        (FAST_LINKS, "pixels"),
        ({"mixed": 60.0, "pixels": 63.5, "splats": 121.0}, "mixed"),
        ({"mixed": 62.6, "pixels": 63.5, "splats": 121.0}, "pixels"),  # it may be the views
        ({"mixed": 9.0, "pixels": 8.0, "splats": 5.0}, "splats"),
        ({"mixed": 10.0, "pixels": 20.0, "splats": 9.9}, "splats"),
    ],
)
def test_the_fastest_stays(times: dict[str, float], chosen: str) -> None:
    run = Run()
    run.take(1000, times)
    assert run.trials.way == chosen and run.ways[-500:] == [chosen] * 500 and not run.trials.trying
    assert set(run.ways) == set(WAYS) and run.ways[:FIRST] == ["mixed"] * FIRST
    assert times[chosen] <= 1.05 * min(times.values()), "at most 5 % behind the best"
    assert len(run.told) == 1 and run.told[0].startswith(f"{chosen}, {times[chosen]:.1f} ms a step; ")
    others = [way for way in WAYS if way != chosen]
    assert run.told[0].endswith(", ".join(f"{way} {times[way]:.1f}" for way in others))
    assert {way: run.trials.figures()[f"exchange_ms_{way}"] for way in WAYS} == pytest.approx(times)


def test_a_way_that_slows_down_is_left() -> None:
    trial, later = {"mixed": 7.0, "pixels": 8.0, "splats": 12.0}, {"mixed": 8.1, "pixels": 6.0, "splats": 12.0}
    run = Run()
    run.take(FIRST, trial)
    while not run.told:
        run.take(run.trials.most or MOST, trial)
    assert run.trials.way == "mixed" and not run.trials.trying
    run.take(PROOF, later)
    assert run.trials.trying and run.trials.way == "mixed" and run.trials.figures() == {}
    run.take(TIMED, later)
    assert not run.trials.trying and run.trials.way == run.trials.chosen == "pixels"
    assert run.told[1:] == ["pixels: mixed took 8.1 ms a step after a while, pixels 8.0"]
    run.take(2000, later)
    assert run.trials.way == "pixels" and run.trials.number == 1 and len(run.told) == 2


@pytest.mark.parametrize("after", [7.9, 8.1])
def test_what_is_not_like_the_rest_proves_nothing(after: float) -> None:
    """Blocks whose steps were taken again, and images that are not of their full size."""
    trial = {"mixed": 7.0, "pixels": 8.0, "splats": 12.0}
    run = Run()
    while not run.told:
        run.take(run.trials.most or MOST, trial)
    run.ready = False
    run.take(2 * PROOF, {**trial, "mixed": 99.0})
    assert not run.trials.trying
    run.ready = True
    run.take(PROOF, {**trial, "mixed": 99.0})
    run.take(2 * MOST, {**trial, "mixed": 99.0}, again=True)
    run.take(TIMED, {**trial, "mixed": after})
    assert run.trials.way == ("pixels" if after > 8 else "mixed") and not run.trials.trying
    run.take(2000, {**trial, "mixed": 99.0})
    assert len(run.told) == (2 if after > 8 else 1), "it is timed once"


def test_pixels_need_no_proof() -> None:
    run = Run()
    while not run.told:
        run.take(run.trials.most or MOST, FAST_LINKS)
    for _ in range(100):
        run.take(16, {**FAST_LINKS, "pixels": 20.0})
        assert not run.trials.trying and run.trials.way == "pixels"
    assert len(run.told) == 1


@pytest.mark.parametrize(
    ("before", "times", "chosen"),
    [
        ("mixed", {"mixed": 10.0, "pixels": 20.0, "splats": 9.9}, "mixed"),
        ("mixed", {"mixed": 10.0, "pixels": 20.0, "splats": 9.7}, "splats"),
        ("pixels", {"mixed": 9.4, "pixels": 10.0, "splats": 20.0}, "mixed"),
        ("pixels", {"mixed": 9.6, "pixels": 10.0, "splats": 20.0}, "pixels"),
        ("mixed", {"mixed": 9.6, "pixels": 10.0, "splats": 20.0}, "pixels"),
    ],
)
def test_what_is_present_stays_where_it_is_nearly_as_fast(before: str, times: dict[str, float], chosen: str) -> None:
    run = Run(taken=10**6)
    run.take(1000, {**dict.fromkeys(WAYS, 20.0), before: 10.0})
    assert run.trials.way == before
    run.points *= 2
    run.take(1000, times)
    assert run.trials.number == 2 and run.trials.way == chosen


def test_a_trial_that_is_due_comes_before_the_proof() -> None:
    trial = {"mixed": 7.0, "pixels": 8.0, "splats": 12.0}
    run = Run(taken=10**6)
    while not run.told:
        run.take(run.trials.most or MOST, trial)
    run.take(PROOF // 2, trial)
    run.points *= 2
    run.take(64, trial)
    assert run.trials.number == 2
    while run.trials.trying:
        run.take(run.trials.most or MOST, trial)
    run.take(PROOF - 64, trial)
    assert not run.trials.trying, "the count begins anew"


def test_a_way_that_is_slow_is_given_up() -> None:
    run = Run()
    run.take(1000, {"mixed": 8.8, "pixels": 7.5, "splats": 100.0})
    assert run.ways.count("splats") == WARM + MOST and run.ways[64:].count("mixed") == WARM + TIMED


def test_what_warms_up_does_not_count() -> None:
    run, slow = Run(), {way: 10 * time for way, time in FAST_LINKS.items()}
    run.take(FIRST, FAST_LINKS)
    while run.trials.trying:
        now = run.trials.way
        first = now not in run.ways[FIRST:]
        run.take(WARM if first else MOST, slow if first else FAST_LINKS)
    assert run.trials.way == "pixels" and run.trials.figures()["exchange_ms_pixels"] == pytest.approx(7.5)
    warmed = WARM * sum(slow.values()) / 7.5 - 3 * WARM
    assert run.trials.figures()["exchange_trials_cost"] > warmed, "but it costs"


def test_room_is_given_up_halfway_through_what_does_not_count() -> None:
    run, settled = Run(), list[tuple[str, int]]()
    run.take(FIRST, FAST_LINKS)
    while run.trials.trying:
        way = run.trials.way
        run.take(run.trials.most or 0, FAST_LINKS)
        if run.trials.settles:
            settled.append((way, run.ways[FIRST:].count(way)))
    assert settled == [(way, WARM // 2) for way in WAYS]


def test_what_trials_have_cost() -> None:
    """In steps of the best way, to the step."""
    run = Run()
    run.take(2000, FAST_LINKS)
    begun = sum(run.ways[k] == "mixed" for k in range(64)) * FAST_LINKS["mixed"] / 1e3  # before the trial
    lost = (run.seconds - begun) / 7.5e-3 - (2000 - 64)
    assert run.trials.figures()["exchange_trials_cost"] == pytest.approx(lost)


def test_another_trial_where_the_model_changed_and_seldom() -> None:
    run = Run()
    run.take(500, FAST_LINKS)
    cost = run.trials.figures()["exchange_trials_cost"]
    run.take(100_000, FAST_LINKS)
    assert run.trials.number == 1, "nothing has changed"
    run.points = 1190
    run.take(1000, FAST_LINKS)
    assert run.trials.number == 1, "not enough has"
    run.points = 1210
    run.take(1000, {"mixed": 5.0, "pixels": 7.5, "splats": 12.0})
    assert run.trials.number == 2 and run.trials.way == "mixed" and run.trials.growth == pytest.approx(1.21)
    run.placings += 1
    run.take(1000, FAST_LINKS)
    assert run.trials.number == 3 and run.trials.way == "pixels", "cut anew"
    busy = Run()
    for _ in range(3000):  # a model that grows all the time
        busy.points = busy.points * 5 // 4
        busy.take(20, FAST_LINKS)
    assert busy.trials.number > 2 and busy.trials.figures()["exchange_trials_cost"] < 0.01 * busy.taken + cost


def test_no_trial_before_images_have_their_size() -> None:
    run = Run()
    run.ready = False
    run.take(2000, FAST_LINKS)
    assert run.trials.number == 0 and set(run.ways) == {"mixed"}
    run.ready = True
    run.take(FIRST - 1, FAST_LINKS)
    assert run.trials.number == 0
    run.take(1, FAST_LINKS)
    assert run.trials.trying


def test_no_trial_without_memory() -> None:
    run = Run()
    run.take(2000, FAST_LINKS, spare=False)
    assert run.trials.number == 0
    run.take(500, FAST_LINKS)
    assert run.trials.way == "pixels"


def test_steps_that_were_taken_again_are_excused_but_not_for_ever() -> None:
    run = Run()
    run.take(64, FAST_LINKS)
    run.take(WARM, FAST_LINKS)
    run.take(3 * MOST, {**FAST_LINKS, "mixed": 99.0}, again=True)
    run.take(500, FAST_LINKS)
    assert run.trials.figures()["exchange_ms_mixed"] == pytest.approx(8.8)
    run = Run()
    run.take(1000, FAST_LINKS, again=True)
    assert run.trials.way == "pixels" and len(run.told) == 1


def test_a_resumed_run_goes_on_with_what_was_chosen() -> None:
    run = Run()
    assert run.trials.knowledge() == []
    run.take(1000, FAST_LINKS)
    rows = run.trials.knowledge()
    assert len(rows) == 1 and Trials.owns(rows[0]) and not Trials.owns([-3, 1])
    again = Run(Trials(WAYS, 2, "pixels"), taken=1000)
    again.trials.learn_again([[-2, 5], *rows, [7, 1]])
    assert again.trials.way == "pixels" and again.trials.knowledge() == rows
    again.placings = 0  # counted from where it goes on
    again.take(30_000, FAST_LINKS)
    assert again.trials.number == 0 and set(again.ways) == {"pixels"}
    again.points = 2000
    again.take(1000, {"mixed": 5.0, "pixels": 7.5, "splats": 12.0})
    assert again.trials.way == "mixed" and again.trials.growth == 2.0
    other = Trials(WAYS, 4, "pixels")
    other.learn_again(rows)
    assert other.way == "mixed" and other.knowledge() == [], "other ranks, other times"


def test_a_trial_under_way_is_made_again() -> None:
    run = Run()
    run.take(1000, FAST_LINKS)
    rows = run.trials.knowledge()
    run.points, run.taken = 5000, 10**6
    run.take(64, FAST_LINKS)
    run.take(60, FAST_LINKS)
    assert run.trials.trying and run.trials.way != run.trials.chosen and run.trials.knowledge() == rows
