"""Shared parts of benchmarks of kernels: options, sections that may fail, tables, the report."""

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.lib.report import empty_table, write_report
from benchmarks.lib.stopwatch import Stopwatch, free
from benchmarks.scenes.city_view import CITIES, city_view
from benchmarks.scenes.garden import DEFAULT, GRIDS, TINY, Garden


@dataclass(frozen=True)
class Line:
    """A figure: what was timed, milliseconds, the hardware's floor for it, and peak memory in bytes."""

    what: str
    ms: float
    floor_ms: float | None = None
    peak_bytes: int | None = None


@dataclass
class Sections:
    """Runs the pieces of a benchmark: one that fails is reported, and the others still run."""

    console: Console
    device: torch.device

    def __post_init__(self) -> None:
        self.failures: list[dict[str, str]] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Run a part of the benchmark; record an exception in it and continue after it."""
        try:
            yield
        except Exception as error:
            self.failures.append({"section": name, "error": f"{type(error).__name__}: {error}"})
            self.console.rule(f"[red]FAILED: {name}")
            self.console.print(traceback.format_exc(), markup=False, highlight=False)
        free(self.device)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options of every GPU benchmark."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    scene_names = [*GRIDS, *CITIES, TINY]
    made.add_argument("--scenes", nargs="+", choices=scene_names, help="default: all gardens; on a CPU the tiny one")
    made.add_argument("--garden", type=Path, default=DEFAULT, metavar="PATH", help="garden.npz (default: %(default)s)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--iterations", type=int, default=30, help="timed runs of each piece, of which the median counts")
    made.add_argument("--quick", action="store_true", help="5 iterations: to see that it runs")
    made.add_argument("--json", type=Path, help="also write the figures here")
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options and set those that follow from others."""
    options = made.parse_args()
    if options.scenes is None:
        options.scenes = list(GRIDS) if options.device == "cuda" else [TINY]
    if options.quick:
        options.iterations = 5
    if options.device == "cuda":
        torch.cuda.init()  # fails here, and says why
        options.device = f"cuda:{torch.cuda.current_device()}"
    return options


def run_scenes(
    name: str, made: argparse.ArgumentParser, measure: Callable[..., dict[str, Any]],
    summarize: Callable[[Console, list[dict[str, Any]]], None] | None = None, more: Sequence[str] = (),
) -> int:  # fmt: skip
    """Measure each scene of a benchmark, and write the report where it was asked for; return the exit status.

    Args:
        measure: takes a scene, the sections and a stopwatch, and then the options named in `more`.
        summarize: prints what follows from all reports, on a GPU.
    """
    options = parse(made)
    device = torch.device(options.device)
    console = Console(width=None if sys.stdout.isatty() else 200)
    sections, watch = Sections(console, device), Stopwatch(device, options.iterations)
    garden = Garden(options.garden, device)
    reports: list[dict[str, Any]] = []
    for scene in options.scenes:
        with sections.section(f"{scene}: scene"):
            found = city_view(scene, device) if scene in CITIES else garden.scene(scene)
            reports.append(measure(found, sections, watch, *(getattr(options, name) for name in more)))
    if summarize is not None and device.type == "cuda":
        summarize(console, reports)
    return finish(name, options, sections, reports)


def show(console: Console, title: str, lines: Sequence[Line]) -> None:
    """Print lines as a table."""
    table = empty_table(title, ("what", "ms", "floor, ms", "times floor", "peak, GiB"))
    for line in lines:
        floor = "" if line.floor_ms is None else f"{line.floor_ms:.3f}"
        times = "" if line.floor_ms is None else f"{line.ms / line.floor_ms:.1f}"
        peak = "" if line.peak_bytes is None else f"{line.peak_bytes / 2**30:.2f}"
        table.add_row(line.what, f"{line.ms:.3f}", floor, times, peak)
    console.print(table)


def ratio(numerator: float | None, denominator: float | None) -> str:
    """Return a ratio as text; "" if either value is missing."""
    return "" if not numerator or not denominator else f"{numerator / denominator:.2f}"


def finish(name: str, options: argparse.Namespace, sections: Sections, scenes: Sequence[dict[str, Any]]) -> int:
    """Write the report if requested and return the exit status."""
    plain, failures = [_plain(scene) for scene in scenes], sections.failures
    write_report(options.json, benchmark=name, iterations=options.iterations, scenes=plain, failures=failures)
    for failure in sections.failures:
        sections.console.print(f"FAILED {failure['section']}: {failure['error'][:300]}", markup=False, highlight=False)
    return 1 if sections.failures else 0


def _plain(scene: dict[str, Any]) -> dict[str, Any]:
    lines = {line.what: {k: v for k, v in asdict(line).items() if k != "what"} for line in scene.get("lines", [])}
    return {**scene, "lines": lines}
