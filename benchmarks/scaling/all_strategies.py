"""Every strategy on one, two, four and eight GPUs of one machine: one table of speeds and of their ratios to one GPU.

    python -m benchmarks.scaling.all_strategies --gpus 1 2 4 8 --seconds 560 --json FILE \\
        --captures fox=FOX south=SOUTH "city=CITY:--recipe best --pipeline.model.max-gaussians 3000000"

The parts, in the order of --parts:

- `steps`: `tile`'s training step, a view a step, in images a second (`benchmarks.scaling.tile`);
- `views`: steps of `batch`, `tile`, `locality` and `pixel` with a view a GPU (`benchmarks.scaling.links.training`);
- `runs`: whole runs of `batch` and `tile` on each capture: training, and from Enter to prompt
  (`benchmarks.captures.capture`);
- `radiance`: rays a second of `nerfacto-xl` with a cell a GPU on the first capture (`benchmarks.captures.radiance`);
- `sort`: the merge-path sort (`benchmarks.scaling.merge_sort`);
- `aggregate`: operators and training steps of the device `multigpu` (`benchmarks.scaling.aggregate`);
- `largest`: some steps of the largest model on all GPUs (`benchmarks.scaling.largest`).

Each part but `views` is the named benchmark's own command, whose report is kept whole. After --seconds no part begins;
--json is rewritten after each, so a call that is cut short leaves what it has. To see that everything runs, on two CPU
workers: --device cpu --quick.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.lib.rank_jobs import Job, run_jobs
from benchmarks.lib.report import write_report
from benchmarks.scaling.limited_links import make_worker
from benchmarks.scaling.links.training import STRATEGIES
from benchmarks.scaling.tile import image_size
from benchmarks.scenes.city_model import CityScene
from ns_multigpu.planning.quantities import parse_count

Speeds = dict[tuple[str, str], dict[int, float]]
"""(what, unit) -> number of GPUs -> its value."""


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    there = torch.cuda.device_count() if cuda else 2
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--gpus", nargs="+", type=int, default=[n for n in (1, 2, 4, 8) if n <= there])
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument(
        "--points",
        nargs="+",
        type=parse_count,
        default=[8_000_000, 50_000_000, 200_000_000],
        help="of `steps` and `views`",
    )
    parser.add_argument(
        "--image", type=image_size, default=(3840, 2160), help="of `steps` and `views`: 1080p, 4K, 8K or WIDTHxHEIGHT"
    )
    parser.add_argument("--images", type=int, default=15000, help="that each of `runs` sees")
    parser.add_argument("--options", default="", help="of ns-train, for all of `runs`, as one string")
    parser.add_argument("--rays-steps", type=int, default=1000, help="of `radiance`")
    parser.add_argument("--keys", type=float, default=1024, help="of `sort`, in units of 2^20")
    parser.add_argument(
        "--largest", type=parse_count, default=540_000_000, help="points of `largest`, with the compact optimizer state"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that all of it runs")
    parser.add_argument("--seconds", type=float, default=1e9, help="after so many no part begins")
    parser.add_argument("--json", type=Path, help="the report, rewritten after every part")
    parser.add_argument(
        "--captures", nargs="*", default=[], metavar="NAME=FOLDER[:OPTIONS]",
        help="of `runs` and `radiance`, in COLMAP's layout (sparse/0), with options of ns-train",
    )  # fmt: skip
    options = parser.parse_args(words)
    if options.device == "cuda" and max(options.gpus) > there:
        parser.error(f"--gpus {max(options.gpus)}: there are {there}.")
    if not options.captures and {"runs", "radiance"} & set(options.parts):
        parser.error("runs and radiance need --captures, or leave both out of --parts.")
    for capture in options.captures:
        name, _, place = capture.partition("=")
        if not name or not Path(place.partition(":")[0] or "-").is_dir():
            parser.error(f"--captures {capture}: give NAME=FOLDER, of a folder that exists.")
    if options.quick:
        options.points, options.image, options.images, options.rays_steps = [2000], (96, 64), 40, 4
        options.keys, options.largest = 0.01, 2000
    options.until = time.time() + options.seconds
    return options


def report_of(module: str, words: Sequence[Any], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a benchmark's command; return its report, with `error` (its last lines) if it fails.

    Args:
        module: below `benchmarks`. words: of its command line. folder: for its report.
    """
    path = folder / f"{module}.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", "--device", options.device, "--json", str(path)]
    done = subprocess.run([*command, *map(str, words)], capture_output=True, text=True, check=False)
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return report if done.returncode == 0 else {**report, "error": (done.stdout + done.stderr)[-2000:]}


def size_of(options: argparse.Namespace) -> str:
    """Return the size of images as the benchmarks take it, WIDTHxHEIGHT."""
    return "{}x{}".format(*options.image)


def steps(options: argparse.Namespace, folder: Path) -> tuple[Any, Speeds]:
    """Return the report on steps of `tile` with a view a step, and their speeds."""
    words = ["--gpus", *options.gpus, "--points", *options.points, "--images", size_of(options)]
    words += ["--sections", "single", "tile", *(["--quick"] if options.quick else [])]
    report, found = report_of("scaling.tile", words, options, folder), Speeds()
    for row in report.get("results", []):
        if "ms" in row and (row["way"] == "single" or (row["kind"] == "tile" and row["usual"] and row["gpus"] > 1)):
            name = f"tile, {row['points']:,} Gaussians, a view a step"
            found.setdefault((name, "images/s"), {})[row["gpus"]] = row["images_per_s"]
    return report, found


def views(options: argparse.Namespace, folder: Path) -> tuple[Any, Speeds]:
    """Return the rows of steps of each strategy with a view a GPU, and their speeds and bytes."""
    rows, found = list[Job](), Speeds()
    timed = {"warm": 2, "steps": 2, "blocks": 1} if options.quick else {"warm": 16, "steps": 24, "blocks": 2}
    for points in options.points:
        for ranks in options.gpus:
            scene = CityScene(points, *options.image, views=max(8, 2 * ranks))
            common: Job = {"scene": asdict(scene), "kind": "aerial", "views": ranks, "gbit": None, "estimate": 0.0}
            jobs = [{**common, "way": strategy} for strategy in STRATEGIES]

            def emit(number: int, result: Job, jobs: list[Job] = jobs, ranks: int = ranks) -> None:
                rows.append({**jobs[number], "gpus": ranks, **result})

            run_jobs(
                make_worker, {**timed, "folder": str(folder)}, jobs, ranks, options.device, emit,
                options.until, 240.0,
            )  # fmt: skip
    for row in rows:
        if "ms" in row:
            name = f"{row['way']}, {row['scene']['points']:,} Gaussians, a view a GPU"
            found.setdefault((name, "images/s"), {})[row["gpus"]] = row["images_per_s"]
            found.setdefault((name, "MB sent a step"), {})[row["gpus"]] = row["bytes"] / 1e6
            found.setdefault((name, "% of the time exchange"), {})[row["gpus"]] = 100 * max(row["exchange"])
    return rows, found


def dataparser_of(folder: str) -> list[str]:
    """Return the dataparser of a capture in COLMAP's layout, every 8th view held out."""
    where = ["colmap", "--data", folder, "--colmap-path", "sparse/0", "--downscale-factor", "1"]
    return [*where, "--eval-mode", "interval", "--eval-interval", "8"]


def runs(options: argparse.Namespace, folder: Path) -> tuple[Any, Speeds]:
    """Return the rows of whole runs of `batch` and `tile`, and their speeds, durations and PSNR."""
    rows, found = list[Any](), Speeds()
    names = [f"{way}-{n}" for n in options.gpus for way in (("batch", "tile") if n > 1 else ("batch",))]
    for capture in options.captures:
        label, _, place = capture.partition("=")
        place, _, more = place.partition(":")
        words = ["--runs", *names, "--images", options.images, f"--options={options.options} {more}".rstrip()]
        report = report_of("captures.capture", [*words, "--", *dataparser_of(place)], options, folder)
        rows += [{"capture": label, **row} for row in report.get("results", [])]
        rows += [{"capture": label, "error": report["error"]}] if "error" in report else []
        for row in report.get("results", []):
            way, _, count = row["run"].partition("-")
            for key, unit in (("images_per_s", "images/s"), ("wall_s", "s, Enter to prompt"), ("psnr", "dB")):
                for name in (way,) if int(count) > 1 else ("batch", "tile"):
                    found.setdefault((f"{label}, {name}", unit), {})[int(count)] = row[key]
    return rows, found


def radiance(options: argparse.Namespace, folder: Path) -> tuple[Any, Speeds]:
    """Return the report on `nerfacto-xl` with a cell a GPU, and its rays a second and PSNR."""
    by_way = {f"xl-{n}x{n}" if n > 1 else "xl-1": n for n in options.gpus}
    place = options.captures[0].partition("=")[2].partition(":")[0]
    words = ["--ways", *by_way, "--steps", options.rays_steps, "--views", 4, "--", *dataparser_of(place)]
    report, found = report_of("captures.radiance", words, options, folder), Speeds()
    for row in report.get("rows", []):
        if "rays_per_s" in row:
            gpus, last = by_way[row["way"]], row["courses"][-1]
            figures = {"rays/s": row["rays_per_s"], "rays/s rendered": last["rays_per_s"], "dB": last["psnr"]}
            for unit, value in figures.items():
                found.setdefault(("nerfacto-xl, a cell a GPU", unit), {})[gpus] = value
    return report, found


def sort(options: argparse.Namespace, folder: Path) -> tuple[Any, Speeds]:
    """Return the report on the merge-path sort, and its speeds."""
    report = report_of("scaling.merge_sort", ["--ranks", *options.gpus, "--sizes", options.keys], options, folder)
    found = Speeds()
    for row in report.get("figures", []):
        name = f"merge-path sort, {row['keys']:,} keys"
        found.setdefault((name, "billion keys/s"), {})[row["ranks"]] = row["giga_keys_per_second"]
    return report, found


def aggregate(options: argparse.Namespace, folder: Path) -> tuple[Any, Speeds]:
    """Return the report on the aggregate device, and milliseconds of its operators and steps."""
    words = ["--gpus", 0, *options.gpus, "--elements", int(options.keys * 2**20), "--image", size_of(options)]
    words += ["--points", min(options.points)]
    report, found = report_of("scaling.aggregate", words, options, folder), Speeds()
    for row in report.get("rows", []):
        for part, values in row["parts"].items():
            for name, value in values.items():
                if name != "error" and row["gpus"] > 0:
                    found.setdefault((f"multigpu, {part}: {name}", "ms"), {})[row["gpus"]] = value
    return report, found


def largest(options: argparse.Namespace, folder: Path) -> tuple[Any, Speeds]:
    """Return the report on the largest model, on all GPUs, and the duration of its step."""
    most = max(options.gpus)
    words = ["--gpus", most, "--points", options.largest, "--image", size_of(options), "--compact"]
    report = report_of(
        "scaling.largest", [*words, *(["--steps", 4, "--views", 2] if options.quick else [])], options, folder
    )
    ms = report.get("result", {}).get("ms")
    return report, {} if ms is None else {(f"largest model, {options.largest:,} Gaussians", "ms a step"): {most: ms}}


PARTS: Mapping[str, Callable[[argparse.Namespace, Path], tuple[Any, Speeds]]] = {
    "steps": steps, "views": views, "runs": runs, "radiance": radiance, "sort": sort,
    "aggregate": aggregate, "largest": largest,
}  # fmt: skip


def table(speeds: Speeds, gpus: Sequence[int]) -> Table:
    """Return a row for each speed; behind each value its ratio to one GPU's, where a higher value is better."""
    shown = Table("what", "unit", *(f"{n} GPU{'s' if n > 1 else ''}" for n in gpus))
    for (name, unit), values in speeds.items():
        cells: list[str] = []
        for n in gpus:
            ratio = f" ({values[n] / values[1]:.2f}x)" if n > 1 and {1, n} <= values.keys() and "/s" in unit else ""
            cells.append(f"{values[n]:,.4g}{ratio}" if n in values else "")
        shown.add_row(name, unit, *cells)
    return shown


def errors(reports: Mapping[str, Any]) -> list[str]:
    """Return a line for each failure within the parts' reports."""
    found: list[str] = []
    for part, report in reports.items():
        rows = (
            report
            if isinstance(report, list)
            else [report, *report.get("results", []), *report.get("rows", []), report.get("result", {})]
        )
        for row in rows:
            problem = row.get("error") or row.get("failed") or row.get("skipped")
            if problem:
                found.append(f"{part} {row.get('way', '')}: {str(problem).strip().splitlines()[-1]}")
    return found


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    began, reports, speeds = time.time(), dict[str, Any](), Speeds()
    console = Console(width=None if sys.stdout.isatty() else 150)
    with tempfile.TemporaryDirectory(prefix="all-strategies-") as folder:
        for part in options.parts:
            found = Speeds()
            if time.time() > options.until:
                reports[part] = {"skipped": "no time left"}
            else:
                reports[part], found = PARTS[part](options, Path(folder))
            speeds |= found
            console.print(f"[{time.time() - began:.0f} s] {part}", markup=False)
            lines = [{"what": name, "unit": unit, "by_gpus": by} for (name, unit), by in speeds.items()]
            write_report(options.json, benchmark="all_strategies", speeds=lines, reports=reports)
    console.print(table(speeds, options.gpus))
    failed = errors(reports)
    for line in failed:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
