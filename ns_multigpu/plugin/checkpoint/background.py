"""Checkpoints that are written while training goes on.

Training stops only while what this rank will write is copied (see training_copy). A thread then writes the copy, with
those of the other ranks and over a process group of their own: two threads must not mix their calls in one. One save is
under way at a time; the training thread reports how it ended when it next calls `look`. The training thread writes by
itself where there is too little memory for copies, and where it must not go on before a checkpoint is complete.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from ns_multigpu.core.dist.replicas import ReplicaDivergedError
from ns_multigpu.core.dist.world import DEFAULT_TIMEOUT, ProcessGroup, World
from ns_multigpu.plugin.checkpoint.atomic_save import remove_old, save
from ns_multigpu.plugin.checkpoint.training_copy import Content, training_copy
from ns_multigpu.plugin.faults.out_of_memory import forget_frames
from ns_multigpu.plugin.faults.signals import NonFiniteError

_LINGER = 2.0
"""Seconds that a failing rank among several waits for its save: they must all have ended within ten."""

_RAISED_BY_ALL = (NonFiniteError, ReplicaDivergedError)
"""Errors that end all ranks after the same step: all of them are there to finish a save."""


@dataclass(frozen=True)
class Outcome:
    """How a save ended.

    Attributes:
        step: whose.
        problem: what the disk said, the same on all ranks; "" if there is a checkpoint now.
        seconds: that it took.
    """

    step: int
    problem: str
    seconds: float


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time. All methods but `look` and `measured` are called by every rank.

    Args:
        models: the run's `nerfstudio_models` folder.
        keep: how many checkpoints a save leaves; 0 for all.
        world: this process's.
        tell: called with a warning for the user.

    Attributes:
        saved_step: the step of the newest checkpoint that is known to be whole; -1 if none is.
    """

    def __init__(self, models: Path, keep: int, world: World, tell: Callable[[str], None]) -> None:
        self._models, self._keep, self._world, self._tell = models, keep, world, tell
        self._under_way: _UnderWay | None = None
        self._measured: dict[str, float] = {}
        self.saved_step = -1

    def save(self, step: int, content: Callable[[], Content], *, background: bool) -> bool:
        """Writes a checkpoint after `step`, unless there is one, when the one on its way is finished.

        Args:
            content: gives what training has come to; called by every rank that calls this, if it is needed.
            background: return once it is copied, where there is memory for that.

        Returns:
            whether there is one now, or one is on its way.
        """
        began = time.perf_counter()
        self.finish()
        if step == self.saved_step:
            return True
        taken = content()
        copied = training_copy(taken, self._world) if background else None
        if copied is not None:
            self._under_way = _UnderWay(
                step, lambda world: self._write(step, copied, world, at_once=False), self._world
            )
        else:
            problem = self._write(step, taken, self._world, at_once=True)
            self._ended(Outcome(step, problem, time.perf_counter() - began))
        stall = 1e3 * (time.perf_counter() - began)
        self._measured["save_stall_ms"] = self._measured.get("save_stall_ms", 0.0) + stall
        return self._under_way is not None or self.saved_step == step

    def begin(self, step: int, content: Content) -> None:
        """Begins to write a checkpoint after `step`, straight from what training has come to: nobody changes that until
        `finish` has been called. If it cannot be written nobody is told: it is not the `saved_step` then.

        Args:
            content: what training has come to. None is on its way.
        """
        self._under_way = _UnderWay(
            step, lambda world: self._write(step, content, world, at_once=True), self._world, tells=False
        )

    def finish(self) -> None:
        """Waits until the save on its way, if there is one, has ended.

        Raises:
            Exception: what ended it, if that was no disk.
        """
        self._collect(None)

    def look(self) -> None:
        """Reports the save that was under way if it has ended, without waiting; ranks may see it after different steps.

        Raises:
            Exception: what ended it, if that was no disk.
        """
        self._collect(0.0)

    def leave(self, error: BaseException) -> None:
        """Before a run ends with `error`: finishes the save on its way, if there are ranks to do it with."""
        all_here = self._world.size == 1 or isinstance(error, _RAISED_BY_ALL)
        try:
            self._collect(None if all_here else _LINGER)
        except Exception as bug:  # the run ends with the error that it has
            self._tell(f"The checkpoint that was on its way could not be written: {bug!r}")
        if self._under_way is not None:
            self._under_way.give_up()
            self._tell(
                f"The checkpoint of step {self._under_way.step} was on its way and is lost; the earlier checkpoints in "
                f"{self._models} are as they were."
            )

    def measured(self) -> dict[str, float]:
        """Milliseconds that training stood still for saves (`save_stall_ms`) and that the last one to end took
        (`save_ms`), each only if there is something new."""
        measured, self._measured = self._measured, {}
        return measured

    def _write(self, step: int, content: Content, world: World, *, at_once: bool) -> str:
        given = (content.pipeline, content.tensors, content.values)
        problem = save(self._models, step, *given, world, at_once=at_once)
        if not problem:
            remove_old(self._models, self._keep, world)
        return problem

    def _collect(self, seconds: float | None) -> None:
        if self._under_way is None or not self._under_way.ended(seconds):
            return
        under_way, self._under_way = self._under_way, None
        outcome = under_way.outcome()
        if under_way.tells or not outcome.problem:
            self._ended(outcome)

    def _ended(self, outcome: Outcome) -> None:
        self._measured["save_ms"] = 1e3 * outcome.seconds
        if outcome.problem:
            self._tell(
                f"The checkpoint of step {outcome.step} could not be written: {outcome.problem}. Training goes on; the "
                f"earlier checkpoints in {self._models} are as they were."
            )
        else:
            self.saved_step = outcome.step


# ---- the thread ----


class _UnderWay:
    """A save that a thread of this rank writes with those of the others.

    Args:
        step: whose.
        write: writes it in the world that it is given; returns what the disk said.
        world: this process's.
        tells: whether the user is told if it cannot be written.
    """

    def __init__(self, step: int, write: Callable[[World], str], world: World, *, tells: bool = True) -> None:
        self.step, self.tells = step, tells
        self._problem, self._seconds = "", 0.0
        self._error: BaseException | None = None
        self._limit: float | None = None if world.size == 1 else _LINGER
        # A daemon: it must not keep a process that fails from ending.
        self._thread = threading.Thread(
            target=self._run, args=(write, world_beside(world)), name="checkpoint", daemon=True
        )
        _under_way.add(self)
        self._thread.start()

    def ended(self, seconds: float | None) -> bool:
        """Whether it has ended, after `seconds` at the latest; None: as long as it takes."""
        if seconds != 0:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def outcome(self) -> Outcome:
        """How it ended.

        Raises:
            Exception: what ended it.
        """
        if self._error is not None:
            raise self._error
        return Outcome(self.step, self._problem, self._seconds)

    def give_up(self) -> None:
        """It has been waited for as long as may be: the process that ends does not wait again."""
        self._limit = 0.0

    def ended_for_exit(self) -> bool:
        """Whether it has ended, as long as a process that ends may wait for it."""
        return self.ended(self._limit)

    def _run(self, write: Callable[[World], str], world: World) -> None:
        began = time.perf_counter()
        try:
            with _own_stream(world.device):
                self._problem = write(world)
        except BaseException as error:
            forget_frames(error)  # they hold the copy, and the process group, whose threads must end before Python
            self._error = error
        del write, world  # and so does this one
        self._seconds = time.perf_counter() - began


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Makes this thread's work on a GPU wait for nothing that training has given it."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


_under_way: WeakSet[_UnderWay] = WeakSet()
_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
"""By control group of a world, the group of the threads beside it."""


def world_beside(world: World) -> World:
    """`world` as a thread beside training may use it: what is over the control group there goes over a group of its own
    here. It is made once; every rank calls it, in the same place."""
    if world.control is None:
        return world
    if world.control not in _groups:
        group = dist.new_group(None, timeout=DEFAULT_TIMEOUT, backend="gloo")
        _groups[world.control] = cast(ProcessGroup, group)
    return replace(world, control=_groups[world.control])


@atexit.register
def _take_leave() -> None:
    """Ends a process that has failed while its save waits for others: Python, which cannot end a thread inside C++,
    would abort. A process that ends in good order has finished its save."""
    if all(under_way.ended_for_exit() for under_way in list(_under_way)):
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
