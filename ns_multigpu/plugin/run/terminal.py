"""Terminal output of a run: a table, or lines without a terminal, and a box at the end."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nerfstudio.utils import writer
from nerfstudio.utils.decorators import check_main_thread
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName, EventType, LocalWriter
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ns_multigpu.plugin.launch.commands import commands_afterwards

if TYPE_CHECKING:
    from ns_multigpu.plugin.run.trainer import DistributedTrainer

_BETWEEN_LINES, _BETWEEN_ROWS = 5.0, 1.0
"""Minimum seconds between two lines without a terminal, and between two rows of the table on one."""

_LOSS = "Train Loss"
"""Name of the training loss among the events of nerfstudio's writers."""

_WIDTHS = {"Loss": 8, "Images/s": 10, "Gaussians": 12, "Memory": 11, "Test PSNR": 11, "Left": 12}
"""Columns of the table and their widths; with the step's 16 they need 80 characters."""

FAR_BELOW = 6.0
"""dB by which training's PSNR must fall below its best before a warning. A reset of opacities, and a higher resolution,
cost less, and only briefly."""


class TerminalLog(LocalWriter):
    """One row per log of training, every few seconds: of a table if stdout is a terminal, else a line.

    A row's numbers come in several writes, since evaluations and deferred logs have their own. The loss is the last. A
    PSNR stands in the next row that is printed.

    Args:
        config: nerfstudio's `LocalWriterConfig`. banner_messages: lines above the table.
    """

    def __init__(self, config: Any, banner_messages: list[str] | None = None) -> None:
        super().__init__(config, banner_messages)
        self._latest: dict[str, Any] = {}
        self._last = float("-inf")
        # nerfstudio evaluates during training only if there are writers besides this one, which is the last.
        self._table = ProgressTable(config.max_log_size, evaluates=bool(writer.EVENT_WRITERS))
        self._banner = banner_messages or []

    @check_main_thread
    def write_stats_log(self, step: int) -> None:
        """Collect the numbers to be written; print a row if a step's loss is among them and a row is due."""
        numeric = [event for event in writer.EVENT_STORAGE if event["write_type"] is not EventType.IMAGE]
        self._latest.update({event["name"]: event["event"] for event in numeric})
        losses = [event["step"] for event in numeric if event["name"] == _LOSS]
        if not losses:
            return
        step, steps, on_terminal = losses[-1], writer.GLOBAL_BUFFER["max_iter"], sys.stdout.isatty()
        apart = _BETWEEN_ROWS if on_terminal else _BETWEEN_LINES
        if time.monotonic() - self._last < apart and step + 1 < steps:
            return
        numbers = numbers_of(self._latest)
        self._last, self._latest = time.monotonic(), {}
        for name, event in (("Test PSNR", EventName.CURR_TEST_PSNR), ("Left", EventName.ETA)):
            if event.value not in self.stats_to_track:
                numbers.pop(name, None)
        if not on_terminal:
            print(line(step, steps, numbers), flush=True)
            return
        banner, self._banner = self._banner, []
        print(*banner, self._table.row(step, steps, numbers), sep="\n", flush=True)


def numbers_of(latest: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers of a row as text, by column; a column without a number is left out.

    Args:
        latest: the events of nerfstudio's writers, by name.
    """
    row = latest.get("Step", {})
    evaluated = latest.get("Eval Images Metrics Dict (all images)", latest.get("Eval Images Metrics", {}))
    found: dict[str, tuple[Any, Callable[[float], str]]] = {
        "Loss": (latest.get(_LOSS), lambda loss: f"{loss:.4f}"),
        "Images/s": (row.get("images_per_s"), lambda rate: f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"),
        "Gaussians": (row.get("gaussians"), lambda count: f"{count:,.0f}"),
        "Memory": (row.get("memory_gib"), lambda gib: f"{gib:.1f} GiB"),
        "Test PSNR": (evaluated.get("psnr"), lambda psnr: f"{psnr:.2f} dB"),
        "Left": (latest.get(EventName.ETA.value), duration),
    }
    return {name: text(float(value)) for name, (value, text) in found.items() if value is not None}


def line(step: int, steps: int, numbers: Mapping[str, str]) -> str:
    """Return a row of the table as one line, for a file or a pipe.

    Args:
        step: the step. steps: the total number. numbers: see `numbers_of`.
    """
    phrases = {
        "Loss": "loss {}", "Images/s": "{} images/s", "Gaussians": "{} Gaussians", "Memory": "{} memory",
        "Test PSNR": "{} on held-out views", "Left": "{} left",
    }  # fmt: skip
    parts = [f"step {step:,} of {steps:,} ({_percent(step, steps)})"]
    return ", ".join(parts + [phrases[name].format(text) for name, text in numbers.items()])


class ProgressTable:
    """Table of training, one row after another: redrawing it in place would overwrite messages between its rows.

    Args:
        rows: number of rows after which the header is repeated; 0 for never.
        evaluates: whether held-out views are evaluated during training.
    """

    def __init__(self, rows: int, *, evaluates: bool) -> None:
        self._rows, self._printed, self._evaluates = rows, 0, evaluates
        self._columns: list[str] = []

    def row(self, step: int, steps: int, numbers: Mapping[str, str]) -> str:
        """Return a row, below the header if that is due.

        Args:
            step: the step. steps: the total number. numbers: see `numbers_of`; the first row's decide on the columns.
        """
        later = {"Test PSNR"} if self._evaluates else set[str]()
        columns = self._columns or [name for name in _WIDTHS if name in {*numbers, *later}]
        lines = [f"{'Step':<16}" + "".join(f"{name:>{_WIDTHS[name]}}" for name in columns)]
        if self._printed and not (self._rows and self._printed % self._rows == 0):
            lines = []
        texts = "".join(f"{numbers.get(name, ''):>{_WIDTHS[name]}}" for name in columns)
        self._columns, self._printed = columns, self._printed + 1
        return "\n".join([*lines, f"{f'{step:,} ({_percent(step, steps)})':<16}{texts}"])


def _percent(step: int, steps: int) -> str:
    return f"{100 * step / max(steps, 1):.0f} %"


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


def print_metrics(metrics: Mapping[str, float], views: int) -> None:
    """Print the metrics of held-out views as a table.

    Args:
        metrics: means by nerfstudio's names, and standard deviations as `<metric>_std`; LPIPS may be missing.
        views: number of views.
    """
    forms = {
        "psnr": ("PSNR", "{:.2f} dB"), "cc_psnr": ("PSNR, corrected colours", "{:.2f} dB"), "ssim": ("SSIM", "{:.4f}"),
        "lpips": ("LPIPS", "{:.4f}"), "fps": ("Images/s", "{:.3g}"),
    }  # fmt: skip
    table = Table("Metric", "Mean", "Std. dev.", title=f"{views} held-out views")
    for name, (title, form) in forms.items():
        mean, deviation = metrics.get(name, math.nan), metrics.get(f"{name}_std", math.nan)
        if math.isfinite(mean):
            table.add_row(title, form.format(mean), form.format(deviation) if math.isfinite(deviation) else "")
        elif name == "lpips":
            table.add_row(title, "not measured", "")
    CONSOLE.print(table)


def say_how_it_went(trainer: "DistributedTrainer", folder: Path, held_out: Any) -> None:
    """Print the summary of a run and commands for next actions.

    Args:
        trainer: a `DistributedTrainer`, done. folder: the run's, or the one with its last checkpoint.
        held_out: a `HeldOut` of the last evaluation; None without one.
    """
    unit, batch = trainer.objective.unit, trainer.objective.units_per_step
    steps = trainer.step + 1
    seen, taken = steps * batch, (steps - trainer._start_step) * batch
    lines = [
        (unit.capitalize(), f"{seen:,}" if taken == seen else f"{seen:,} ({taken:,} since resuming)"),
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
