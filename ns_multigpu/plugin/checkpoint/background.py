"""Checkpoint writer that saves while training continues.

Training stops only while this rank's data are copied (see training_copy). A thread then writes the copy, together with
the threads of other ranks. They use their own process group, since two threads must not interleave collectives in one.
At most one save is in progress; `look` reports its result. The training thread writes by itself if memory is too small
for copies, or if the checkpoint must be complete first.
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
from ns_multigpu.plugin.checkpoint.to_host import copy_stream
from ns_multigpu.plugin.checkpoint.training_copy import Content, training_copy
from ns_multigpu.plugin.faults.out_of_memory import forget_frames
from ns_multigpu.plugin.faults.signals import NonFiniteError

_LINGER = 2.0
"""Seconds that a failing rank of several waits for its save: all ranks must end within ten."""

_RAISED_BY_ALL = (NonFiniteError, ReplicaDivergedError)
"""Errors that end all ranks after the same step: all ranks can then finish a save."""


@dataclass(frozen=True)
class Outcome:
    """Result of a save.

    Attributes:
        step: step of the checkpoint.
        problem: the disk's error, the same on all ranks; "" on success.
        seconds: duration of the save.
    """

    step: int
    problem: str
    seconds: float


class CheckpointWriter:
    """Writer of a run's checkpoints, one at a time. Every rank calls all methods but `look` and `measured`.

    Args:
        models: the run's `nerfstudio_models` folder.
        keep: number of checkpoints to keep; 0 for all.
        world: this process's.
        report: called with a warning for the user.

    Attributes:
        saved_step: step of the newest checkpoint known to be complete; -1 if none is.
    """

    def __init__(self, models: Path, keep: int, world: World, report: Callable[[str], None]) -> None:
        self._models, self._keep, self._world, self._report = models, keep, world, report
        self._under_way: _UnderWay | None = None
        self._measured: dict[str, float] = {}
        self.saved_step = -1

    def save(self, step: int, content: Callable[[], Content], *, background: bool) -> bool:
        """Write a checkpoint after `step`, unless it exists; wait for the save in progress first.

        Args:
            content: returns the training state; called on every rank, if it is needed.
            background: return once the state is copied, if memory allows.

        Returns:
            True if the checkpoint exists or its save is in progress.
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
            problem = self._write(step, taken, self._world)
            self._ended(Outcome(step, problem, time.perf_counter() - began))
        stall = 1e3 * (time.perf_counter() - began)
        self._measured["save_stall_ms"] = self._measured.get("save_stall_ms", 0.0) + stall
        return self._under_way is not None or self.saved_step == step

    def write(self, step: int, content: Callable[[], Content], folder: Path | None = None) -> str:
        """Write a checkpoint after `step`, unless it exists, and wait for it. A failure is not reported.

        Args:
            content: as of `save`. folder: to write to instead of the run's; nothing is removed from it.

        Returns:
            "" on success; otherwise the disk's error.
        """
        self.finish()
        if folder is None and step == self.saved_step:
            return ""
        problem = self._write(step, content(), self._world, folder=folder)
        if not problem and folder is None:
            self.saved_step = step
        return problem

    def begin(self, step: int, content: Content) -> None:
        """Start to write a checkpoint after `step` without a copy: `content` must not change until `finish` returns.

        A failure is not reported: `saved_step` then keeps its value. No other save may be in progress.

        Args:
            content: the training state.
        """
        self._under_way = _UnderWay(step, lambda world: self._write(step, content, world), self._world, reports=False)

    def finish(self) -> None:
        """Wait for the save in progress, if there is one.

        Raises:
            Exception: an error of the save other than the disk's.
        """
        self._collect(None)

    def look(self) -> None:
        """Report the save in progress if it has ended, without waiting; ranks may see it after different steps.

        Raises:
            Exception: an error of the save other than the disk's.
        """
        self._collect(0.0)

    def close(self, error: BaseException) -> None:
        """Finish the save in progress before a run ends with `error`, if the other ranks can take part."""
        all_here = self._world.size == 1 or isinstance(error, _RAISED_BY_ALL)
        try:
            self._collect(None if all_here else _LINGER)
        except Exception as bug:  # `error` ends the run
            self._report(f"The checkpoint that was on its way could not be written: {bug!r}")
        if self._under_way is not None:
            self._under_way.stop_waiting()
            self._report(
                f"The checkpoint of step {self._under_way.step} was on its way and is lost; the earlier checkpoints in "
                f"{self._models} are as they were."
            )

    def measured(self) -> dict[str, float]:
        """Return new timings in milliseconds: training's stall for saves (`save_stall_ms`), and the last save's
        duration (`save_ms`).
        """
        measured, self._measured = self._measured, {}
        return measured

    def _write(
        self, step: int, content: Content, world: World, *, at_once: bool = True, folder: Path | None = None
    ) -> str:
        given = (content.pipeline, content.tensors, content.values)
        problem = save(folder or self._models, step, *given, world, at_once=at_once)
        if not problem and folder is None:
            remove_old(self._models, self._keep, world, step)
        return problem

    def _collect(self, seconds: float | None) -> None:
        if self._under_way is None or not self._under_way.ended(seconds):
            return
        under_way, self._under_way = self._under_way, None
        outcome = under_way.outcome()
        if under_way.reports or not outcome.problem:
            self._ended(outcome)

    def _ended(self, outcome: Outcome) -> None:
        self._measured["save_ms"] = 1e3 * outcome.seconds
        if outcome.problem:
            self._report(
                f"The checkpoint of step {outcome.step} could not be written: {outcome.problem}. Training goes on; the "
                f"earlier checkpoints in {self._models} are as they were."
            )
        else:
            self.saved_step = outcome.step


# ---- the thread ----


class _UnderWay:
    """Save that threads of all ranks write together.

    Args:
        step: step of the checkpoint.
        write: writes it in the given world; returns the disk's error.
        world: this process's.
        reports: True to report a failure to the user.
    """

    def __init__(self, step: int, write: Callable[[World], str], world: World, *, reports: bool = True) -> None:
        self.step, self.reports = step, reports
        self._problem, self._seconds = "", 0.0
        self._error: BaseException | None = None
        self._limit: float | None = None if world.size == 1 else _LINGER
        # A daemon does not keep a failing process alive.
        self._thread = threading.Thread(
            target=self._run, args=(write, side_world(world)), name="checkpoint", daemon=True
        )
        _under_way.add(self)
        self._thread.start()

    def ended(self, seconds: float | None) -> bool:
        """Return True if the save has ended, after at most `seconds`; None waits without limit."""
        if seconds != 0:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def outcome(self) -> Outcome:
        """Return the result of the save.

        Raises:
            Exception: the error of the save.
        """
        if self._error is not None:
            raise self._error
        return Outcome(self.step, self._problem, self._seconds)

    def stop_waiting(self) -> None:
        """Set the time limit to 0, so that the ending process does not wait again."""
        self._limit = 0.0

    def ended_for_exit(self) -> bool:
        """Wait up to the time limit of an ending process; return True if the save has ended."""
        return self.ended(self._limit)

    def _run(self, write: Callable[[World], str], world: World) -> None:
        began = time.perf_counter()
        try:
            with _own_stream(world.device):
                self._problem = write(world)
        except BaseException as error:
            forget_frames(error)  # frames hold the copy and the process group, whose threads must end before Python
            self._error = error
        del write, world  # this frame holds them too
        self._seconds = time.perf_counter() - began


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Run this thread's GPU work on its own stream, so it does not wait for training's."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(copy_stream(device)):
        yield


_under_way: WeakSet[_UnderWay] = WeakSet()
_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
"""Process group of the background threads, by a world's control group."""


def side_world(world: World) -> World:
    """Return `world` with a control group of its own, for a background thread. The group is created once; every rank
    calls it, in the same order.
    """
    if world.control is None:
        return world
    if world.control not in _groups:
        group = dist.new_group(None, timeout=DEFAULT_TIMEOUT, backend="gloo")
        _groups[world.control] = cast(ProcessGroup, group)
    return replace(world, control=_groups[world.control])


@atexit.register
def _run_exit_hook() -> None:
    """End a failed process whose save waits for others. Python would abort, since it cannot end a thread inside C++. A
    process that ends in good order has finished its save.
    """
    if all(under_way.ended_for_exit() for under_way in list(_under_way)):
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
