"""Errors that speak to the person at the terminal, and how they are shown there.

They stay ordinary exceptions for whoever calls the plugin from Python; only an exception that nobody caught is turned
into a message instead of a traceback.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.text import Text

LAST_WORDS = 0.5
"""Seconds a failing worker lingers. A peer's sudden death shows in the others as a broken connection, within
milliseconds; the agent, which looks every 0.1 s, must find the dead one and not them."""


class PlainError(Exception):
    """An error whose message is all that the person at the terminal needs: it is shown without a traceback.

    Attributes:
        title: what it is shown under.
    """

    title = "Training stopped"


class InputError(PlainError, ValueError):
    """What was asked for cannot be done. The message says what is wrong and what to do about it."""

    title = "This cannot be started"


class SaveFailed(PlainError, RuntimeError):
    """A run's last checkpoint could not be written. The message says what is lost, and where it could be saved."""

    title = "The model is not saved"


PLAIN = {kind.__name__: kind for kind in (InputError, SaveFailed)}
"""The plain errors by name, for a process that hears of another's."""


class WorkerFailed(RuntimeError):
    """A worker process ended with an error.

    Attributes:
        report: the worker's own traceback, or what is known of its end if it left none.
    """

    def __init__(self, summary: str, report: str) -> None:
        super().__init__(summary)
        self.report = report


def show(error: PlainError | WorkerFailed) -> None:
    """Writes `error` to stderr without a traceback of this process.

    When a launcher such as torchrun has started several ranks, all of them may end with the same error: the first of
    each machine shows it in full, the others in one line. Where there are several machines, each says which it is.
    """
    console, rank = Console(stderr=True), f"rank {os.environ.get('RANK', '?')}"
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    here = f"machine {os.environ.get('GROUP_RANK', '?')} ({socket.gethostname()})" if several else ""
    if isinstance(error, WorkerFailed):
        console.print(Text(error.report.rstrip()))
        _framed(console, "Training stopped", str(error))
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        _framed(console, f"{error.title} ({rank} on {here})" if several else error.title, str(error))
    else:
        console.print(Text(f"{rank}{f' on {here}' if several else ''}: {str(error).splitlines()[0]}"))


def _framed(console: Console, title: str, text: str) -> None:
    """Shows a message between two lines. What is indented is a command: it is not broken, so that it can be copied."""
    console.rule(Text(title, "bold red"), style="red", align="left")
    for line in text.splitlines():
        console.print(Text(line), soft_wrap=line.startswith("  "))
    console.rule(style="red")


def end_soon(status: int, seconds: float = 3.0) -> None:
    """Sees to it that this process, which is about to end, has ended in `seconds`: its libraries may wait for peers."""

    def wait() -> None:
        time.sleep(seconds)
        os._exit(status)

    threading.Thread(target=wait, name="end soon", daemon=True).start()


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, (PlainError, WorkerFailed)):
        show(error)
    elif isinstance(error, KeyboardInterrupt):
        print("Stopped by Ctrl-C.", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
    if "RANK" in os.environ:
        _take_leave(error)


def _take_leave(error: BaseException) -> None:
    """Ends a worker that another launcher started so that its launcher finds the first to fail, and shows why it did.

    Torchrun shows what lies in a file of its form, last of all. A rank that only failed because another was gone must
    not be gone sooner than that one is seen to be.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        report = "".join(traceback.format_exception(error))
        extra = {"py_callstack": report, "timestamp": str(int(time.time()))}
        text = f"{type(error).__name__}: {error}"
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), "utf8")
    end_soon(1)
    time.sleep(LAST_WORDS)


def show_uncaught() -> None:
    """From now on this process shows an uncaught `PlainError`, `WorkerFailed` or Ctrl-C as its message; its exit status
    stays what it was.

    Another hook that somebody has installed is left in place.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _excepthook
