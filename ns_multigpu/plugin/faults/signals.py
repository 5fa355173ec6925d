"""What ends a run early (signals, stalls, NaN or infinity), and how a process ends that must not go on.

`StopSignals` turns Ctrl-C and SIGTERM into a request that all ranks grant after the same step. The errors of this file
are those that a restart would not mend, or that say on whose account a run ended.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from ns_multigpu.core.dist.collectives import max_int
from ns_multigpu.core.dist.world import World

STOPPING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

_REPEAT = 1.0
"""Seconds within which a second signal counts as the first one again: a terminal sends Ctrl-C to every process, and
launchers pass on to their workers what they have been sent themselves."""

_STUCK = 4.0
"""Seconds after a signal in which a rank must move on, or be taken for one that waits for a dead peer."""

GO_ON, WAIT, RENDER, STOP, _SIGNAL = 0, 1, 2, 3, 16
MANY = 1 << 30
"""Steps that may be taken before the ranks look again, where nobody says how many."""
_FAR = 1 << 40
"""Below zero: a rank that says nothing of steps says this, so that the one that does is heard. (Zero, and what lies
behind, are GO_ON and the others.)"""


class NonFiniteError(ArithmeticError):
    """NaN or infinity in the loss, the gradients or the parameters. A restart would meet it again."""


class RanOutOfMemory(RuntimeError):
    """A rank's device or its machine has no memory left. A restart would meet it again."""


class StallError(RuntimeError):
    """A rank has kept the others waiting for too long."""


class Interrupted(SystemExit):
    """The run was asked to stop, and has stopped after the same step on every rank.

    Attributes:
        code: the exit status that shells expect, 128 + the signal's number.
        signum: the signal.
        checkpoint: where to continue from, if anything was saved.
    """

    def __init__(self, signum: int, checkpoint: Path | None) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.checkpoint = checkpoint


class Progress(Protocol):
    """What is known of a rank's own progress; see `watchdog.Heartbeat`."""

    @property
    def beats(self) -> int: ...

    def patience(self, least: float) -> float | None: ...


class StopSignals:
    """Listens for Ctrl-C, SIGTERM and SIGHUP while it is entered.

    The first asks to stop and the run goes on until all ranks have agreed (`verdict`). A second, a second later or
    more, ends this process at once. A process that was asked to stop but waits inside a collective for a peer that has
    died cannot run Python's signal handlers; a thread ends it once it has stood still for some seconds.

    Args:
        progress: whether this rank moves; None where nothing can make it wait.
        on_first: called with the signal's number when the first arrives, in the main thread.
        on_second: called instead of ending the process when the second arrives, in the main thread.

    Outside the main thread, where Python cannot listen, it does nothing.
    """

    def __init__(
        self,
        progress: Progress | None = None,
        on_first: Callable[[int], None] | None = None,
        on_second: Callable[[int], None] | None = None,
    ) -> None:
        self._progress, self._on_first, self._on_second = progress, on_first, on_second
        self._before: dict[int, object] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._wakeup_before = -1
        self._first_time = 0.0
        self.requested = 0
        """Number of the signal that asked this process to stop; 0 if none did."""
        self.agreed = 0
        """Number of the signal, received by any rank, for which all ranks have agreed to stop; 0 if there is none."""
        self.granted = MANY
        """Steps that all ranks may take before they ask `verdict` again, as rank 0 said when they last did."""

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in STOPPING_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup sets SIGHUP
                self._before[signum] = signal.signal(signum, self._handle)
        if self._progress is not None:
            self._wakeup = socket.socketpair()
            self._wakeup[1].setblocking(False)  # Python asks for it
            self._wakeup_before = signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(self._wakeup[0],), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        self._before = {}
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._wakeup[1].close()  # the thread reads the end of the stream, and ends
            self._wakeup = None

    def verdict(
        self, world: World, *, stop: bool = False, wait: bool = False, render: bool = False, steps: int = MANY
    ) -> int:
        """What all ranks do now: GO_ON, WAIT (ask again soon), RENDER (then ask again) or STOP; every rank calls it and
        gets the same.

        One integer over the control group. A signal on any rank stops all of them, and is then in `agreed` of all.

        Args:
            stop: this rank has another reason to end.
            wait: this rank wants to pause.
            render: this rank has an image to be rendered by all.
            steps: of rank 0, how many steps all may take before they ask again; `granted` has it on all then.
        """
        going = (steps if world.is_main else 0) - _FAR
        other = STOP if stop else RENDER if render else WAIT if wait else going
        wish = _SIGNAL + self.requested if self.requested else other
        answer = max_int(wish, world)
        if answer >= _SIGNAL:
            self.agreed = answer - _SIGNAL
            return STOP
        if answer > GO_ON:
            return answer
        self.granted = answer + _FAR
        return GO_ON

    @contextlib.contextmanager
    def as_keyboard_interrupt(self) -> Iterator[None]:
        """Within, a signal raises KeyboardInterrupt, also one that came before: for waits that nothing else ends."""
        kept = {signum: signal.signal(signum, _interrupt) for signum in self._before}
        try:
            if self.requested:
                raise KeyboardInterrupt
            yield
        finally:
            for signum, handler in kept.items():
                signal.signal(signum, handler)

    def _handle(self, signum: int, _: object) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first_time = signum, now
            if self._on_first is not None:
                self._on_first(signum)
        elif now - self._first_time > _REPEAT:
            (self._on_second or _end_now)(signum)

    def _watch(self, wakeup: socket.socket) -> None:
        """In a thread: ends the process if a signal asked it to stop and it makes no progress. Signals wake this thread
        through a socket that the interpreter's C code writes to, even while the main thread runs no Python."""
        assert self._progress is not None
        signum, since, still, seen = 0, 0.0, 0.0, -1
        with wakeup:
            while True:
                try:
                    data = wakeup.recv(64)
                except TimeoutError:
                    data = None
                if data == b"":
                    return
                now = time.monotonic()
                for byte in data or b"":
                    if byte not in STOPPING_SIGNALS:
                        continue
                    if not signum:
                        signum, since = byte, now
                        wakeup.settimeout(0.1)
                    elif now - since > _REPEAT and self._on_second is None:
                        _end_now(byte)
                if signum:
                    patience = self._progress.patience(_STUCK)
                    if self._progress.beats != seen or patience is None:
                        seen, still = self._progress.beats, now
                    elif now - still > patience:
                        _end_now(signum)


def stop_before_training() -> None:
    """From now on a signal that asks this process to stop does so in one line, until `StopSignals` listens for it.

    nerfstudio would show where it was when it was interrupted.
    """
    if threading.current_thread() is threading.main_thread():
        for signum in STOPPING_SIGNALS:
            if signal.getsignal(signum) in (signal.default_int_handler, signal.SIG_DFL):
                signal.signal(signum, _stop_at_once)


def _stop_at_once(signum: int, _: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"Stopped by {signal_name(signum)} before training began: nothing was saved.", file=sys.stderr)
    raise SystemExit(128 + signum)


def signal_name(signum: int) -> str:
    """SIGTERM for 15."""
    return signal.Signals(signum).name


def _interrupt(signum: int, _: object) -> None:
    raise KeyboardInterrupt


def _end_now(signum: int) -> None:
    os._exit(128 + signum)


_last_words: Callable[[BaseException], None] | None = None


def set_last_words(leave: Callable[[BaseException], None] | None) -> None:
    """Sets what `end_process` calls with the error before it ends this process: a worker's way to hand the error to
    the process that started it."""
    global _last_words
    _last_words = leave


def end_process(error: BaseException, status: int = 1) -> None:
    """Ends this process because of `error`, from a thread beside the main one, which is blocked and cannot raise it."""
    try:
        if _last_words is not None:
            _last_words(error)
    finally:
        os._exit(status)
