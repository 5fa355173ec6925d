"""Errors with messages for the user, and their display.

They are ordinary exceptions for Python code that calls the plugin. Only uncaught ones are shown as a message instead of
a traceback.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.text import Text

EXIT_DELAY_S = 0.5
"""Seconds that a failing worker waits before it exits. Its peers see a broken connection within milliseconds. The
agent, which polls every 0.1 s, must find the first failed worker before them."""


class PlainError(Exception):
    """Error whose message is all that the user needs: it is shown without a traceback.

    Attributes:
        title: heading of the message.
    """

    title = "Training stopped"


class InputError(PlainError, ValueError):
    """Error of an invalid request. The message says what is wrong and what to do about it."""

    title = "Cannot start"


class SaveFailed(PlainError, RuntimeError):
    """Failure to write a run's last checkpoint. The message says what is lost, and where it could be saved."""

    title = "The model is not saved"


PLAIN = {kind.__name__: kind for kind in (InputError, SaveFailed)}
"""Plain errors by name, for a process that receives another's."""


class WorkerFailed(RuntimeError):
    """Error of a worker process.

    Attributes:
        report: the worker's own traceback, or what is known of its end if it left none.
    """

    def __init__(self, summary: str, report: str) -> None:
        super().__init__(summary)
        self.report = report


def show(error: PlainError | WorkerFailed) -> None:
    """Write `error` to stderr without a traceback of this process.

    If a launcher such as torchrun has started several ranks, all may end with the same error. The first of each machine
    shows it in full, the others in one line. With several machines, each names itself.
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
    """Print a message between two lines. Indented lines are commands and are not wrapped, so that they can be
    copied."""
    console.rule(Text(title, "bold red"), style="red", align="left")
    for line in text.splitlines():
        console.print(Text(line), soft_wrap=line.startswith("  "))
    console.rule(style="red")


def end_soon() -> None:
    """Exit this process with status 1 within three seconds, even if its libraries wait for peers."""

    def wait() -> None:
        time.sleep(3.0)
        os._exit(1)

    threading.Thread(target=wait, name="end soon", daemon=True).start()


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, (PlainError, WorkerFailed)):
        show(error)
    elif isinstance(error, KeyboardInterrupt):
        print("Stopped by Ctrl-C.", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
    if "RANK" in os.environ:
        _run_exit_hook(error)


def _run_exit_hook(error: BaseException) -> None:
    """End a worker of another launcher so that the launcher finds the first failure and its reason.

    Torchrun shows the contents of its error file at the end. A rank that failed only because of another must exit after
    the other is detected.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        report = "".join(traceback.format_exception(error))
        extra = {"py_callstack": report, "timestamp": str(int(time.time()))}
        text = f"{type(error).__name__}: {error}"
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), "utf8")
    end_soon()
    time.sleep(EXIT_DELAY_S)


def show_uncaught() -> None:
    """Show an uncaught `PlainError`, `WorkerFailed` or Ctrl-C of this process as its message; keep the exit status.

    Another installed hook is left in place.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _excepthook


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file. On success it is renamed to `path`, on failure removed.

    Raises:
        InputError: its folder cannot be made or written.
    """
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}. Choose another place.") from error
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
