"""Terminal output of a run: a table redrawn in place, or a line per print without a terminal, and a box at the end."""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nerfstudio.utils import writer
from nerfstudio.utils.decorators import check_main_thread
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName, LocalWriter
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ns_multigpu.plugin.launch.commands import commands_afterwards

_BETWEEN_LINES = 5.0
"""Minimum seconds between two lines without a terminal."""

FAR_BELOW = 6.0
"""dB by which training's PSNR must fall below its best before a warning. A reset of opacities, and a higher resolution,
cost less, and only briefly."""


class TerminalLog(LocalWriter):
    """nerfstudio's table if stdout is a terminal; else a line every few seconds."""

    _last = float("-inf")

    @check_main_thread
    def write_stats_log(self, step: int) -> None:
        """See nerfstudio's."""
        if sys.stdout.isatty():
            super().write_stats_log(step)
        elif step % writer.GLOBAL_BUFFER["steps_per_log"] == 0:
            self._print_line()

    def _print_line(self) -> None:
        latest = {event["name"]: event["event"] for event in writer.EVENT_STORAGE}
        evaluated = EventName.CURR_TEST_PSNR.value in latest
        due = time.monotonic() - self._last >= _BETWEEN_LINES and EventName.ITER_TRAIN_TIME.value in latest
        if evaluated or due:
            self._last = time.monotonic()
            print(line(writer.GLOBAL_BUFFER["step"], writer.GLOBAL_BUFFER["max_iter"], latest), flush=True)


def line(step: int, steps: int, latest: Mapping[str, Any]) -> str:
    """Return a run's progress in one line.

    Args:
        step: the step. steps: the total number.
        latest: nerfstudio's numbers, by name.
    """
    parts = [f"step {step:,} of {steps:,} ({100 * step / max(steps, 1):.0f} %)"]
    if (seconds := latest.get(EventName.ITER_TRAIN_TIME.value)) is not None:
        parts.append(f"{1e3 * seconds:.3g} ms a step")
    if (loss := latest.get("Train Loss")) is not None:
        parts.append(f"loss {float(loss):.4f}")
    if (psnr := latest.get(EventName.CURR_TEST_PSNR.value)) is not None:
        parts.append(f"{float(psnr):.2f} dB on a held-out view")
    if (left := latest.get(EventName.ETA.value)) is not None:
        parts.append(f"{duration(left)} left")
    return ", ".join(parts)


@contextmanager
def quiet(console: Console) -> Iterator[None]:
    """Suppress output of the console within the context."""
    before, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = before


def duration(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def print_summary(lines: Sequence[tuple[str, str]], commands: Sequence[tuple[str, str]]) -> None:
    """Print the run summary.

    Args:
        lines: (name, text) of each entry.
        commands: (name, command) of possible next actions; each command is printed on one line, to be copied.
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, text in lines:
        table.add_row(Text(name, "bold"), Text(text))
    CONSOLE.print(Panel(table, title="[bold green]Training finished[/bold green]", expand=False))
    for name, command in commands:
        CONSOLE.print(Text(f"{name}:\n  {command}"), soft_wrap=True)


def say_how_it_went(trainer: Any, folder: Path, held_out: Any) -> None:
    """Print the summary of a run and commands for next actions.

    Args:
        trainer: a `DistributedTrainer`, done. folder: the run's, or the one with its last checkpoint.
        held_out: a `HeldOut` of the last evaluation; None without one.
    """
    unit, batch = trainer.objective.unit, trainer.objective.units_per_step
    steps = trainer.step + 1
    seen, taken = steps * batch, (steps - trainer._start_step) * batch
    lines = [
        (unit.capitalize(), f"{seen:,}" if taken == seen else f"{seen:,}, {taken:,} of them now"),
        ("Training", f"{duration(trainer.progress.seconds)}, {taken / trainer.progress.seconds:,.0f} {unit} a second"),
        *((name.capitalize(), f"{count:,}") for name, count in trainer.objective.size().items()),
        ("Run folder", str(folder)),
    ]
    if held_out is not None:
        lines.insert(0, ("PSNR", held_out.described()))
    psnr = trainer.progress.psnr
    if psnr.fallen:
        lines.append(("Warning", f"training's PSNR ended at {psnr.now:.1f} dB; its best was {psnr.best[0]:.1f}"))
    if trainer.config.max_num_images is not None:
        longer = ("--max-num-images", str(math.ceil(2 * steps * trainer.pipeline.images_per_step)))
    else:
        longer = ("--max-num-iterations", str(2 * steps))
    models = folder / trainer.config.relative_model_dir
    print_summary(lines, commands_afterwards(str(trainer.config.method_name), folder, models, *longer))


class PsnrWatch:
    """Monitor of training's PSNR that detects when the images become worse.

    Args:
        patience: consecutive logs for which PSNR must be far below its best; the mean is over half as many.

    Attributes:
        best: the best mean so far, dB, and its step.
        now: the current mean, dB; None before the first log.
    """

    def __init__(self, patience: int = 100) -> None:
        self._patience, self._window = patience, max(patience // 2, 1)
        self._logs = self._below = 0
        self._warned = False
        self.now: float | None = None
        self.best: tuple[float, int] = (float("-inf"), -1)

    @property
    def fallen(self) -> bool:
        """True if the mean is far below its best."""
        return self.now is not None and self.now < self.best[0] - FAR_BELOW

    def look(self, psnr: float, step: int) -> str:
        """Add a training PSNR.

        Returns:
            a warning, once; else "".
        """
        self._logs += 1
        weight = 1 / min(self._logs, self._window)
        self.now = psnr if self.now is None else self.now + weight * (psnr - self.now)
        if self._logs >= self._window and self.now > self.best[0]:
            self.best = (self.now, step)
        self._below = self._below + 1 if self.fallen else 0
        if self._warned or self._below < self._patience:
            return ""
        self._warned = True
        return (
            f"Quality is collapsing: training's PSNR is {self.now:.1f} dB, and was {self.best[0]:.1f} dB at step "
            f"{self.best[1]:,}. Look at learning rates and --batch-scaling, or stop (Ctrl-C) and go on from an earlier "
            "checkpoint with lower ones."
        )
