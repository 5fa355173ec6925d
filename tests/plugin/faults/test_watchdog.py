"""Late ranks, found by the ranks' progress records; the watchdog's own thread, with ranks that are threads."""

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.signals import StallError
from ns_multigpu.plugin.faults.watchdog import Heartbeat, Note, Watchdog, describe, late_ranks
from tests.lib.processes import until
from tests.lib.ranks import run_ranks

HERE = Note(0, beats=50, step=7, phase="exchange", age=130.0)


def test_the_rank_with_the_fewest_phases_is_late() -> None:
    notes = [HERE, replace(HERE, rank=1, beats=49, phase="data", stack="  in load"), replace(HERE, rank=2)]
    late = late_ranks(notes)
    assert [note.rank for note in late] == [1]
    text = describe(notes, late)
    assert "Rank 1 is late: in step 7, phase data, for 130 s." in text and "in load" in text
    assert "rank 0 in step 7, exchange; rank 2 in step 7, exchange" in text


def test_a_rank_that_does_not_answer_is_late() -> None:
    notes = [replace(HERE, beats=40), replace(HERE, rank=1, silent=True, phase="data")]
    late = late_ranks(notes)
    assert [note.rank for note in late] == [1] and "does not answer: last heard of in step 7" in describe(notes, late)


def test_the_device_that_is_behind_is_late() -> None:
    notes = [replace(HERE, device_step=7), replace(HERE, rank=1, device_step=5)]
    late = late_ranks(notes)
    assert [note.rank for note in late] == [1] and "its GPU has not finished step 6" in describe(notes, late)


def test_device_progress_uses_recycled_events(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        made: ClassVar[list["Event"]] = []

        def __init__(self) -> None:
            self.recorded, self.passed = 0, False
            self.made.append(self)

        def record(self) -> None:
            self.recorded, self.passed = self.recorded + 1, False

        def query(self) -> bool:
            return self.passed

    monkeypatch.setattr(torch.cuda, "Event", Event)
    heart = Heartbeat()

    def step(number: int) -> None:
        heart.beat("compute", number)
        heart.mark_device()

    assert heart.note(0).device_step is None
    step(0)
    step(1)
    assert heart.note(0).device_step == -1, "it has begun, and finished none"
    Event.made[0].passed = True
    assert heart.note(0).device_step == 0
    step(2)
    assert len(Event.made) == 2 and Event.made[0].recorded == 2, "the first one's, which has come to pass"
    assert heart.note(0).device_step == 0, "it stands for step 2 now"
    step(3)
    assert len(Event.made) == 3, "the two others have not come to pass"
    Event.made[1].passed = Event.made[2].passed = True
    assert heart.note(0).device_step == 1
    Event.made[0].passed = True
    assert heart.note(0).device_step == 3


def test_no_rank_is_late_if_all_stopped() -> None:
    notes = [HERE, replace(HERE, rank=1, age=127.0)]
    assert late_ranks(notes) == []
    assert "All ranks are in step 7, phase exchange, for 127 s" in describe(notes, [])


def test_a_rank_is_named_with_its_machine() -> None:
    world = replace(World.single(), rank=0, size=4, local_size=2, hosts=("node0", "Node7"))
    notes = [replace(HERE, rank=rank) for rank in range(4)]
    notes[3] = replace(HERE, rank=3, beats=49, phase="data", stack="  in load")
    text = describe(notes, late_ranks(notes), world.rank_name)
    assert "Rank 3 on machine 1 (Node7) is late: in step 7, phase data" in text
    assert "Rank 3 on machine 1 (Node7) is here:\n  in load" in text
    assert "Waiting for it: rank 0 on machine 0 (node0) in step 7" in text and "rank 2 on machine 1 (Node7) in" in text
    silent = [replace(note, silent=note.rank == 2) for note in notes]
    assert "Rank 2 on machine 1 (Node7) is late and does not answer" in describe(
        silent, late_ranks(silent), world.rank_name
    )
    assert "All ranks are" in describe(notes[:3], [], world.rank_name)


def test_patience_follows_the_pace_and_long_phases_have_none() -> None:
    heart = Heartbeat()
    assert heart.patience(1.0) is None, "kernels are built in the first step"
    heart.beat("decide", 0)
    heart.beat("compute")
    assert heart.patience(1.0) is None
    heart.beat("decide", 1)
    assert heart.patience(1.0) == 1.0
    time.sleep(0.5)
    heart.beat("compute", 1)
    slow = heart.patience(1.0)
    assert slow is not None and 1.5 <= slow < 3
    heart.beat("checkpoint")
    assert heart.patience(1.0) is None
    assert replace(heart.note(3), age=0.0) == Note(3, beats=5, step=1, phase="checkpoint", age=0.0)


class Rank(threading.Thread):
    """A rank that is a thread: takes two steps, then stands in `phase`, for `age` seconds already."""

    def __init__(self, rank: int, store: dist.Store, phase: str, seconds: float, age: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.heart, self.rank, self.phase, self.seconds, self.age = Heartbeat(), rank, phase, seconds, age
        self.store, self.done = store, threading.Event()
        self.said: list[str] = []
        self.aborted: list[StallError] = []
        self.dog = Watchdog(
            self.heart, rank, 2, store, 0.4, 0.9, say=self.said.append, abort=self.aborted.append, period=0.05
        )

    def run(self) -> None:
        with self.dog:
            for step in range(2):
                self.heart.beat("decide", step)
                self.heart.beat("compute")
            if self.rank == 0:
                self.heart.beat("exchange")
            else:
                self.heart.beat(self.phase)
                self.heart.beats -= 1  # one phase behind the other
            if self.age:
                assert until(lambda: self.store.check(["note/0", "note/1"]))
                self.heart._at -= self.age
            self.done.wait(self.seconds)


@pytest.mark.parametrize(("phase", "fires"), [("data", True), ("evaluation", False)])
def test_warns_then_ends_but_not_in_long_phases(phase: str, fires: bool) -> None:
    store = dist.HashStore()
    ranks = [Rank(rank, store, phase, 2.5) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(10)
    if not fires:
        assert not any(rank.said or rank.aborted for rank in ranks)
        return
    assert len(ranks[0].said) == 1 and not ranks[1].said, "one rank speaks, once"
    assert "Rank 1 is late: in step 1, phase data" in ranks[0].said[0]
    assert "self.done.wait(self.seconds)" in ranks[0].said[0], "the late one's stack"
    assert all(len(rank.aborted) == 1 and "Rank 1 is late" in str(rank.aborted[0]) for rank in ranks)


@pytest.mark.parametrize("phase", ["evaluation", "checkpoint"])
@pytest.mark.parametrize(("age", "warns", "ends"), [(3.0, False, False), (5.0, True, False), (8.6, True, True)])
def test_long_phases_have_ten_times_as_long(phase: str, age: float, warns: bool, ends: bool) -> None:
    """Limits of 0.4 and 0.9 s: a warning after 4 s, the end after 9."""
    store = dist.HashStore()
    ranks = [Rank(rank, store, phase, 60.0, age) for rank in range(2)]
    for rank in ranks:
        rank.start()
    if ends:
        assert until(lambda: all(rank.aborted for rank in ranks), 10)
    else:
        assert until(lambda: not warns or bool(ranks[0].said), 10)
        time.sleep(0.3)
    for rank in ranks:
        rank.done.set()
        rank.join(10)
    assert [len(rank.said) for rank in ranks] == [int(warns), 0]
    assert [len(rank.aborted) for rank in ranks] == [int(ends)] * 2
    assert all(f"Rank 1 is late: in step 1, phase {phase}" in said for said in ranks[0].said)


def _stall(world: World, file: Path, skew: float) -> tuple[list[str], list[str]]:
    """Rank 1 stands still, and its machine's clocks are off by `skew` seconds."""
    if world.rank == 1:
        today, since = time.time, time.monotonic
        time.time, time.monotonic = (lambda: today() + skew), (lambda: since() + skew)
    rank = Rank(world.rank, dist.FileStore(str(file), 2), "data", 60.0)
    rank.start()
    assert until(lambda: bool(rank.aborted), 30)
    barrier(world)
    rank.done.set()
    rank.join(10)
    return rank.said, [str(error) for error in rank.aborted]


@pytest.mark.parametrize("skew", [-86_400.0, 86_400.0])
def test_clocks_of_machines_need_not_agree(tmp_path: Path, skew: float) -> None:
    """Clocks a day off, of the day and since the start: each rank says for how long it stands, by its own."""
    # On a busy machine a rank may be slow to answer, and others then say that it does not: not three times.
    outcomes = (run_ranks(_stall, 2, tmp_path / f"store-{number}", skew) for number in range(3))
    assert any(all(_agree(said, aborted) for said, aborted in of_ranks) for of_ranks in outcomes)


def _agree(said: list[str], aborted: list[str]) -> bool:
    late = all(re.search(r"Rank 1 is late: in step 1, phase data, for [0-9] s\.", one) for one in said + aborted)
    return late and len(aborted) == 1 and bool(re.match("Training has stood still for [0-9] s", aborted[0]))


class Stopped(dist.HashStore):
    """The store of a launcher that has been stopped."""

    def add(self, *_: object) -> int:
        raise RuntimeError("timed out")


def test_a_store_that_does_not_answer_is_no_reason_to_wait() -> None:
    rank = Rank(0, Stopped(), "data", 2.0)
    rank.start()
    rank.join(10)
    assert "does not answer" in rank.said[0] and len(rank.aborted) == 1
