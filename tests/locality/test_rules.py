"""Plans made ahead: served when all have them, never waited for, misses counted, the same on every rank."""

import threading
import time

import numpy as np
import pytest

from ns_multigpu.locality.assign import Assigner, by_capacity
from ns_multigpu.locality.rules import Access, Planner
from tests.lib.processes import until

VIEWS, PATCHES, RANKS = 6, 4, 4


class Held(Assigner):
    """Makes no plan before `gate` is open."""

    gate: threading.Event

    def assign(self, needed: np.ndarray) -> np.ndarray:
        assert self.gate.wait(30)
        return super().assign(needed)


def needs(views: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 5000, (views * PATCHES, RANKS)).astype(np.float64)


def wait_for(planner: Planner, step: int) -> None:
    assert until(lambda: planner.ready_through() >= step, 30), "no plan was made"


def test_plan_equals_assignment_of_its_inputs() -> None:
    assigner = Assigner(2, 2)
    planner = Planner(assigner)
    rows = needs(2)
    submitted = rows.copy()
    planner.submit(7, submitted)
    submitted[:] = 0  # what is recorded later does not come in
    wait_for(planner, 7)
    obtained = planner.serve(7, agreed=7)
    assert obtained.planned and np.array_equal(obtained.ranks, assigner.assign(rows))
    assert (planner.num_planned, planner.misses) == (1, 0)
    planner.close()


def test_a_late_plan_stalls_nothing_and_is_a_miss() -> None:
    assigner = Held(2, 2)
    object.__setattr__(assigner, "gate", threading.Event())
    planner = Planner(assigner)
    rows = needs(2)
    planner.submit(0, rows)
    planner.submit(1, rows)
    assert planner.ready_through() == -1
    start = time.monotonic()
    obtained = planner.serve(0, planner.ready_through())
    assert time.monotonic() - start < 1
    assert not obtained.planned and np.array_equal(obtained.ranks, by_capacity(rows))
    assert (planner.num_planned, planner.misses) == (0, 1)
    assigner.gate.set()
    wait_for(planner, 1)
    assert planner.serve(1, 1).planned
    assert (planner.num_planned, planner.misses) == (1, 1)
    planner.close()


def test_ranks_of_different_speed_serve_the_same() -> None:
    """One of them makes plans only now and then, and both record new needs while plans are made."""
    slow = Held(2, 2)
    object.__setattr__(slow, "gate", threading.Event())
    both = [Planner(Assigner(2, 2)), Planner(slow)]
    generator, obtained = np.random.default_rng(1), []
    batches = [generator.choice(VIEWS, 2, replace=False).tolist() for _ in range(30)]
    accesses = [Access(PATCHES, RANKS) for _ in both]

    def submit(number: int, step: int) -> None:
        known = [accesses[number].of(view) for view in batches[step]]
        both[number].submit(step, np.concatenate([one for one in known if one is not None]))

    for number in range(2):
        accesses[number].record(range(VIEWS), needs(VIEWS))
        for step in range(3):
            submit(number, step)
    for step in range(30):
        (slow.gate.set if step % 4 == 3 else slow.gate.clear)()
        if step % 4 == 3:
            for planner in both:
                wait_for(planner, min(step + 1, 29))
        agreed = min(planner.ready_through() for planner in both)
        results = [planner.serve(step, agreed) for planner in both]
        assert np.array_equal(results[0].ranks, results[1].ranks) and results[0].planned == results[1].planned
        obtained.append(results[0].planned)
        for number in range(2):
            accesses[number].record(batches[step], needs(2, step))
            if step + 3 < 30:
                submit(number, step + 3)
    assert both[0].misses == both[1].misses == obtained.count(False) > 0
    assert obtained.count(True) > 0
    slow.gate.set()
    for planner in both:
        planner.close()


def test_views_without_record_are_distributed_round_robin() -> None:
    planner = Planner(Assigner(2, 2))
    planner.submit(0, 3 * PATCHES)
    assert planner.ready_through() == 0
    obtained = planner.serve(0, 0)
    assert np.bincount(obtained.ranks).tolist() == [3, 3, 3, 3] and not obtained.planned
    assert planner.misses == 1
    planner.close()


def test_failure_in_the_thread_is_raised() -> None:
    class Broken(Assigner):
        def assign(self, needed: np.ndarray) -> np.ndarray:
            raise ArithmeticError("no such thing")

    planner = Planner(Broken(2, 2))
    planner.submit(0, needs(1))
    planner._thread.join(30)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(RuntimeError, match="no such thing"):
        planner.serve(0, 0)


def test_access_is_kept_for_a_checkpoint() -> None:
    access = Access(PATCHES, RANKS)
    access.record([4, 2], needs(2))
    assert access.of(3) is None
    again = Access(PATCHES, RANKS)
    again.load_state(*access.state())
    found = again.of(4)
    assert found is not None and np.array_equal(found, needs(2)[:PATCHES])
    found[:] = 0
    assert again.of(4) is not None and again.of(4).sum() > 0  # type: ignore[union-attr]
    access.forget()
    assert access.of(4) is None and access.state()[1].shape == (0, PATCHES, RANKS)
