"""Time of a run's parts besides training, from the start of its process.

The parts of the main thread are consecutive: each begins when the last one ended. Work of other threads is listed
separately. Only the standard library is imported here, for the first part is imports.
"""

import atexit
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class RunParts:
    """Times of a run's parts so far. A worker continues those of the process that started it.

    Attributes:
        began: start of the run's first process, and last: end of the last part; seconds since the machine's boot.
        parts: milliseconds of the main thread, by name, in order.
        concurrent: milliseconds of other threads, by name.
    """

    began: float
    last: float
    parts: dict[str, float] = field(default_factory=dict)
    concurrent: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of_this_process() -> "RunParts":
        """Return the parts of a process that has just imported this module, after Python, torch and nerfstudio."""
        began = _began()
        parts = RunParts(began, began)
        parts.done("imports of torch and nerfstudio")
        return parts

    def done(self, part: str) -> None:
        """End `part`, which began when the previous one ended; repeated parts are summed."""
        now = _now()
        self.parts[part] = self.parts.get(part, 0.0) + 1e3 * (now - self.last)
        self.last = now

    @contextmanager
    def while_busy(self, part: str) -> Iterator[None]:
        """Count the enclosed work of another thread as `part`."""
        start = _now()
        try:
            yield
        finally:
            self.concurrent[part] = self.concurrent.get(part, 0.0) + 1e3 * (_now() - start)

    def as_dict(self) -> dict[str, float]:
        """Return milliseconds by part for the run's summary; those of other threads last, and marked."""
        rows = {**self.parts, **{f"{name} (concurrent)": spent for name, spent in self.concurrent.items()}}
        return {name: round(spent, 1) for name, spent in rows.items()}

    def add_exit(self, file: Path, part: str) -> None:
        """Write the duration of the interpreter's exit to `file`, a JSON object whose `startup_ms` are these, at exit.

        Later work (the driver releases the GPU) is visible only to a process that waits for this one.
        """
        self._at_exit = file, part

    def write_exit(self) -> None:
        """Write the time from the last part until now, if `add_exit` was called."""
        asked: tuple[Path, str] | None = vars(self).pop("_at_exit", None)
        if asked is None:
            return
        file, part = asked
        self.done(part)
        with suppress(OSError, ValueError):  # the run is over: errors can no longer be handled
            summary = json.loads(file.read_text("utf8"))
            summary["startup_ms"] = self.as_dict()
            concurrent = file.with_name(f"{file.name}.new")
            concurrent.write_text(json.dumps(summary, indent=2) + "\n", "utf8")
            concurrent.replace(file)


def run_parts() -> RunParts:
    """Return the parts of this process."""
    return _state[0]


def go_on_with(parts: RunParts) -> None:
    """Continue the parts of the process that started this one."""
    _state[0] = parts


def _now() -> float:
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # the same for all processes of a machine
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _began() -> float:
    """Return the start time of this process, as `_now` counts; the current time if unknown."""
    try:
        # The 20th word behind the name, which may hold anything but this bracket last: clock ticks since boot.
        ticks = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
        return int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return _now()


_state = [RunParts.of_this_process()]
_at_exit: Callable[[], None] = atexit.register(lambda: run_parts().write_exit())  # as early as possible: it runs last
