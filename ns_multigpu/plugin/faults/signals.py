"""Early ends of a run (signals, stalls, NaN or infinity), and the exit of a process that must not continue.

`StopSignals` turns Ctrl-C and SIGTERM into a request that all ranks grant after the same step. The errors of this file
are those that a restart would not fix, or that name the cause of a run's end.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ns_multigpu.core.dist.collectives import max_int
from ns_multigpu.core.dist.world import World

STOPPING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

_REPEAT = 1.0
"""Seconds within which a second signal counts as a repetition: a terminal sends Ctrl-C to every process, and launchers
forward their own signals to their workers."""

_STUCK = 4.0
"""Seconds after a signal without progress after which a rank is taken to wait for a dead peer."""

GO_ON, WAIT, RENDER, STOP, _SIGNAL = 0, 1, 2, 3, 16
MANY = 1 << 30
"""Default number of steps until the next agreement."""
_FAR = 1 << 40
"""Offset below zero of a rank's number of steps, so that rank 0's is the maximum; other verdicts are 0 and above."""


class NonFiniteError(ArithmeticError):
    """NaN or infinity in the loss, the gradients or the parameters. A restart would fail alike."""


class RanOutOfMemory(RuntimeError):
    """Lack of memory on a rank's device or machine. A restart would fail alike."""


class StallError(RuntimeError):
    """Stall of a rank, for which the others have waited too long."""


class Interrupted(SystemExit):
    """End of a run on request, after the same step on every rank.

    Attributes:
        code: the exit status that shells expect, 128 + the signal's number.
        signum: the signal.
        checkpoint: checkpoint to resume from, if anything was saved.
    """

    def __init__(self, signum: int, checkpoint: Path | None) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.checkpoint = checkpoint


class Progress(Protocol):
    """Progress of a rank; see `watchdog.Heartbeat`."""

    @property
    def beats(self) -> int: ...

    def patience(self, least: float) -> float | None: ...


class StopSignals:
    """Handler of Ctrl-C, SIGTERM and SIGHUP while it is entered.

    The first signal requests a stop, and the run continues until all ranks have agreed (`verdict`). A second, a second
    later or more, ends this process at once. A process that waits in a collective for a dead peer cannot run Python's
    signal handlers. A thread ends it after some seconds without progress.

    Args:
        progress: this rank's progress; None if nothing can make it wait.
        on_first: called in the main thread with the first signal's number.
        on_second: called in the main thread instead of ending the process at the second signal.

    Outside the main thread, where Python cannot handle signals, it has no effect.
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
        """Steps that all ranks may run before the next `verdict`, as rank 0 set at the last one."""

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in STOPPING_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup sets SIGHUP
                self._before[signum] = signal.signal(signum, self._handle)
        if self._progress is not None:
            self._wakeup = socket.socketpair()
            self._wakeup[1].setblocking(False)  # Python requires it
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
        """Return what all ranks do now, the same on each: GO_ON, WAIT, RENDER (both: call again) or STOP. Every rank
        calls it.

        It exchanges one integer over the control group. A signal on any rank stops all of them, and is then in `agreed`
        of all.

        Args:
            stop: this rank has another reason to end.
            wait: this rank wants to pause.
            render: this rank has an image to be rendered by all.
            steps: on rank 0, number of steps until the next agreement; all ranks store it in `granted`.
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

    def _handle(self, signum: int, _: object) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first_time = signum, now
            if self._on_first is not None:
                self._on_first(signum)
        elif now - self._first_time > _REPEAT:
            (self._on_second or _end_now)(signum)

    def _watch(self, wakeup: socket.socket) -> None:
        """End the process if a signal requested a stop and it makes no progress; runs in a thread.

        Signals wake this thread through a socket to which the interpreter's C code writes, even while the main thread
        runs no Python.
        """
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
    """Make stop signals end this process with one line of output, until `StopSignals` handles them.

    nerfstudio would print a traceback.
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
    """Return the name of a signal, such as SIGTERM for 15."""
    return signal.Signals(signum).name


def _end_now(signum: int) -> None:
    os._exit(128 + signum)


_error_hook: Callable[[BaseException], None] | None = None


def set_error_hook(hook: Callable[[BaseException], None] | None) -> None:
    """Set the function that `end_process` calls with the error before it ends this process: a worker sends the error to
    its parent."""
    global _error_hook
    _error_hook = hook


def end_process(error: BaseException, status: int = 1) -> None:
    """End this process because of `error`, from another thread than the main one, which is blocked and cannot
    raise it."""
    try:
        if _error_hook is not None:
            _error_hook(error)
    finally:
        os._exit(status)
