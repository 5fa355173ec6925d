"""Runs a program behind a progress bar: its output goes to a log, and to the terminal only if it fails."""

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Watch = Callable[[], tuple[float, str] | None]
"""Looks how far the program is: (fraction done, a few words), or None if that cannot be said yet."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]")
_PERCENT = re.compile(r"(\d{1,3})(?:\.\d+)?\s?%")
_BAR = re.compile("[━╸╺]")
_SHOWN_LINES = 60


class CommandFailed(RuntimeError):
    """A program ended with an error; the message holds its command line and the end of its output."""


class Stages:
    """A column of progress bars, one a program, shown together.

    Args:
        logs: folder for the programs' output, one file each.
        environment: variables for them, in addition to this process's own.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        # The programs draw their bars as if on a terminal, so that their percentages can be read off.
        self._environment = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TERM": "xterm", **environment}
        columns = (SpinnerColumn(), TextColumn("{task.description:<22}"), BarColumn(30), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[note]}"))

    def __enter__(self) -> "Stages":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(text, highlight=False)

    def run(self, name: str, title: str, command: Sequence[str], watch: Watch | None = None) -> float:
        """Run `command` to its end, with its output in the log `name`.log. Return the seconds it took.

        Raises:
            CommandFailed: it ended with an error.
        """
        task = self._progress.add_task(title, total=None, note="")
        start = time.monotonic()
        path = self._logs / f"{name}.log"
        with path.open("w", encoding="utf8") as log:
            process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            unfinished = ""
            try:
                for text in _output(process):
                    whole, newline, unfinished = (unfinished + text.replace("\r", "\n")).rpartition("\n")
                    log.write(_readable(whole + newline))
                    if seen := (watch() if watch else None) or _percentage(text):
                        # Never all of it: a bar that was full once stops its clock.
                        self._progress.update(task, total=1.0, completed=min(seen[0], 0.995), note=seen[1])
                process.wait()
            finally:
                log.write(_readable(unfinished))
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait()
        if process.returncode != 0:
            self._progress.update(task, note="[red]failed")
            lines = path.read_text("utf8").rstrip().splitlines()[-_SHOWN_LINES:]
            raise CommandFailed(
                f"{' '.join(command)}\nended with status {process.returncode}. The end of {path}:\n\n"
                + "\n".join(lines)
            )
        note = (seen[1] if (seen := watch() if watch else None) else "") or "done"
        self._progress.update(task, total=1.0, completed=1.0, note=note)
        self._progress.stop_task(task)
        return time.monotonic() - start


def _output(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the output of `process` as it is written; an empty string if there was none for a moment."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    while True:
        ready, _, _ = select.select([descriptor], [], [], 0.25)
        if not ready:
            yield ""
            continue
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return
        yield chunk.decode("utf8", "replace")


def _percentage(text: str) -> tuple[float, str] | None:
    found = _PERCENT.findall(_ESCAPES.sub("", text))
    return (min(int(found[-1]) / 100, 1.0), "") if found else None


def _readable(text: str) -> str:
    """Remove colours, cursor movements and the states of progress bars."""
    lines = _ESCAPES.sub("", text).splitlines(keepends=True)
    return "".join(line for line in lines if line.strip() and not _BAR.search(line))
