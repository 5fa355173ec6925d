"""Detection of a run without progress, and of the rank that the others wait for.

The training thread only records its step and the phase that it begins (a few assignments, no device, no network). Once
a second a thread of each rank publishes that record, a `Note`, in the launcher's key-value store. When its own rank has
made no progress for too long, the thread asks all ranks for fresh notes with stack traces, and reports who is behind.
"""

import json
import os
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ns_multigpu.core.dist.collectives import broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.signals import StallError, end_process

LONG_PHASES = frozenset({"start", "evaluation", "checkpoint"})
"""Phases that may take longer than others. The first step counts as `start`: kernels may be compiled in it."""
_LONGER = 10.0
_ANSWER = timedelta(seconds=15)
"""Timeout of requests to the launcher's store."""
_SILENCE = 10
"""Periods after which a rank that has not answered a request for a note counts as silent."""


@dataclass(frozen=True)
class Note:
    """Progress of a rank, as it last published it.

    Attributes:
        rank: the rank.
        beats: number of phases it has begun; all ranks begin the same ones in the same order.
        step: the step, -1 before the first.
        phase: the phase that it began last.
        age: seconds since then.
        device_step: the last step whose rendering and backward its device has finished; None if the host computes.
        silent: True if it publishes no more (its process is stopped, gone, or stuck outside Python).
        stack: stack trace of its training thread, if it was requested and available.
    """

    rank: int
    beats: int
    step: int
    phase: str
    age: float
    device_step: int | None = None
    silent: bool = False
    stack: str = ""


class Heartbeat:
    """Progress of this rank, written by the training thread and read by others."""

    def __init__(self) -> None:
        self.step, self.phase, self.beats = -1, "start", 0
        self._at = time.monotonic()
        self._gap = 0.0
        self._steps = 0
        self._device: deque[tuple[int, Any]] = deque()
        self._spare: deque[Any] = deque()  # completed events: making one takes longer than recording it
        self._device_step: int | None = None

    def beat(self, phase: str, step: int | None = None) -> None:
        """Record that this rank begins `phase`, of `step` if that has changed. Costs about a microsecond."""
        now = time.monotonic()
        if self.phase not in LONG_PHASES:
            self._gap = max(now - self._at, 0.95 * self._gap)
        if step is not None and step != self.step:
            self.step = step
            self._steps += 1
        self.phase = phase if self._steps > 1 or phase in LONG_PHASES else "start"
        self._at = now
        self.beats += 1

    def mark_device(self) -> None:
        """Record that the part of this step that waits for no other rank has been launched."""
        event = self._spare.popleft() if self._spare else torch.cuda.Event()
        event.record()
        self._device.append((self.step, event))

    def note(self, rank: int) -> Note:
        """Return the note to publish. Called by the watchdog's thread only."""
        while self._device and self._device[0][1].query():
            self._device_step, event = self._device.popleft()
            self._spare.append(event)
        device_step = -1 if self._device_step is None and self._device else self._device_step
        return Note(rank, self.beats, self.step, self.phase, time.monotonic() - self._at, device_step)

    def patience(self, least: float) -> float | None:
        """Return the seconds in one phase that count as a stall: three times the slowest recent one, at least `least`.

        It is None in a long phase, which has no such limit.
        """
        return None if self.phase in LONG_PHASES else max(least, 3 * self._gap)


def late_ranks(notes: Sequence[Note]) -> list[Note]:
    """Return the late ranks: silent ones, else those with the fewest phases, else those with the fewest device steps.

    It is empty if all have the same progress.
    """
    silent = [note for note in notes if note.silent]
    if silent:
        return silent
    last = min(note.beats for note in notes)
    if any(note.beats > last for note in notes):
        return [note for note in notes if note.beats == last]
    done = [note.device_step for note in notes if note.device_step is not None]
    if len(done) == len(notes) and max(done) > min(done):
        return [note for note in notes if note.device_step == min(done)]
    return []


def plain_name(rank: int) -> str:
    """Return the name of a rank on a single machine."""
    return f"rank {rank}"


def describe(notes: Sequence[Note], late: Sequence[Note], name: Callable[[int], str] = plain_name) -> str:
    """Return the report on a stall for the user.

    Args:
        notes: notes of all ranks. late: those of the late ranks.
        name: returns the name of a rank.
    """
    lines: list[str] = []

    def begin(note: Note) -> str:
        called = name(note.rank)
        return called[:1].upper() + called[1:]

    for note in late:
        where = f"in step {note.step}, phase {note.phase}" if note.step >= 0 else "before its first step"
        if note.silent:
            lines.append(
                f"{begin(note)} is late and does not answer: last heard of {where}. Its process is stopped, "
                "gone, or stuck outside Python."
            )
        elif note.device_step is not None and all(other.beats == note.beats for other in notes):
            lines.append(f"{begin(note)} is late: its GPU has not finished step {note.device_step + 1}.")
        else:
            lines.append(f"{begin(note)} is late: {where}, for {note.age:.0f} s.")
        if note.stack:
            lines.append(f"{begin(note)} is here:\n{note.stack.rstrip()}")
    if not late:
        lines.append(
            f"All ranks are in step {notes[0].step}, phase {notes[0].phase}, for {min(n.age for n in notes):.0f} s: a "
            "device, or the connection between them, does not finish what it was given."
        )
        shown = next((note for note in notes if note.stack), None)
        if shown is not None:
            lines.append(f"{begin(shown)} is here:\n{shown.stack.rstrip()}")
    waiting = [note for note in notes if note not in late]
    if late and waiting:
        places = "; ".join(f"{name(n.rank)} in step {n.step}, {n.phase}" for n in waiting)
        lines.append(f"Waiting for it: {places}.")
    return "\n".join(lines)


class Watchdog:
    """Monitor of one rank's progress by a thread, while it is entered.

    Args:
        heartbeat: this rank's.
        rank, size: its rank and the world's size.
        store: store of the ranks' notes; a separate client, since another thread may block a shared one. None in a
            world of one, which is not monitored.
        warn_after, abort_after: seconds without progress until the late ranks are reported, and until the process ends
            with a `StallError`; 0 for never. Evaluations and checkpoints may take ten times as long.
        say: shows a report. abort: ends the process. Changed by tests.
        name: returns the name of a rank with its machine.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        rank: int,
        size: int,
        store: dist.Store | None,
        warn_after: float,
        abort_after: float,
        say: Callable[[str], None] | None = None,
        abort: Callable[[StallError], None] = end_process,
        period: float = 1.0,
        name: Callable[[int], str] = plain_name,
    ) -> None:
        self._heart, self._rank, self._size, self._store = heartbeat, rank, size, store
        self._warn_after, self._abort_after = warn_after, abort_after
        self._say = say or _to_stderr
        self._abort, self._period, self._name = abort, period, name
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.get_ident()

    def __enter__(self) -> "Watchdog":
        self._main = threading.get_ident()
        if self._store is not None and (self._warn_after > 0 or self._abort_after > 0):
            self._thread = threading.Thread(target=self._run, args=(self._store,), name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            # A thread in a store request at interpreter exit may abort the process. After an error, do not wait long
            # for a store that may be gone.
            self._thread.join(2 * self._period if kind is not None else _ANSWER.total_seconds() + self._period)

    def _run(self, store: dist.Store) -> None:
        reported = -1
        while not self._stop.wait(self._period):
            note = self._heart.note(self._rank)
            warn = 0 < self._warn_after < note.age and reported != note.beats
            abort = 0 < self._abort_after < note.age
            try:
                self._write_note(store)
                notes = self._ask_all(store) if warn or abort else []
            except (RuntimeError, OSError):
                notes = None  # the process of the store is stopped or gone
            if not (warn or abort) or self._heart.beats != note.beats or self._stop.is_set():
                continue  # there is progress, perhaps since the request
            report, speaks = self._report(note, notes)
            if warn and self._overdue(note, notes, self._warn_after):
                reported = note.beats
                limit = f" The run is ended after {self._abort_after:.0f} s." if self._abort_after else ""
                if speaks:
                    self._say(f"Training has stood still for {note.age:.0f} s.{limit}\n{report}")
            if abort and self._overdue(note, notes, self._abort_after):
                self._abort(StallError(f"Training has stood still for {note.age:.0f} s.\n{report}"))
                return

    def _report(self, own: Note, notes: Sequence[Note] | None) -> tuple[str, bool]:
        """Return the report, and whether this rank is the one to print it."""
        if notes is None:
            called = self._name(own.rank)
            where = f"{called[:1].upper()}{called[1:]} waits in step {own.step}, phase {own.phase}"
            return f"{where}; the process that keeps the ranks' notes (a launcher, or rank 0) does not answer.", True
        return describe(notes, late_ranks(notes), self._name), own.rank == next(n.rank for n in notes if not n.silent)

    def _overdue(self, own: Note, notes: Sequence[Note] | None, limit: float) -> bool:
        """Return whether every late rank has been in its phase for longer than `limit`, or is silent."""
        late = late_ranks(notes) if notes is not None else []
        return all(n.silent or n.age > limit * (_LONGER if n.phase in LONG_PHASES else 1.0) for n in late or [own])

    def _write_note(self, store: dist.Store) -> None:
        """Publish this rank's note: with its stack if it makes no progress, and with the number of requests seen."""
        note = self._heart.note(self._rank)
        stack = ""
        if note.age > 2 * self._period:
            frame = sys._current_frames().get(self._main)  # pyright: ignore[reportPrivateUsage]
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        answered = store.add("asked", 0)
        note_fields = [note.beats, note.step, note.phase, note.age, note.device_step, stack, answered]
        store.set(f"note/{self._rank}", json.dumps(note_fields))

    def _ask_all(self, store: dist.Store) -> list[Note]:
        """Return all ranks' notes, published after this call began; a rank without one after `_SILENCE` periods is
        silent."""
        question = store.add("asked", 1)
        end = time.monotonic() + _SILENCE * self._period
        while True:
            self._write_note(store)
            notes = [self._read(store, rank, question) for rank in range(self._size)]
            if not any(note.silent for note in notes) or time.monotonic() > end or self._stop.is_set():
                return notes
            time.sleep(self._period / 4)

    def _read(self, store: dist.Store, rank: int, question: int) -> Note:
        key = f"note/{rank}"
        if not store.check([key]):
            return Note(rank, 0, -1, "start", 0.0, silent=True)
        beats, step, phase, age, device_step, stack, answered = json.loads(store.get(key))
        return Note(rank, beats, step, phase, age, device_step, silent=answered < question, stack=stack)


def heartbeat_store(world: World) -> dist.Store | None:
    """Return a client of the launcher's store, or of the default group's, for the ranks' notes; None in a world
    of one."""
    if world.group is None:
        return None
    name = broadcast_object(uuid.uuid4().hex, 0, world)  # the launcher's store may outlive one attempt of the job
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and port:
        store: dist.Store = dist.TCPStore(address, int(port), None, False, _ANSWER)
    else:
        store = dist.distributed_c10d._get_default_store().clone()  # pyright: ignore
    return dist.PrefixStore(f"ns_multigpu/watchdog/{name}", store)


def _to_stderr(report: str) -> None:
    print(report, file=sys.stderr, flush=True)
