"""Time `splatfacto-tile`'s training step on several GPUs against one GPU and gsplat.

    python -m benchmarks.tile --gpus 1 2 4 --points 8M 50M --images 1080p 4K 8K --json FILE [--seconds 540]

The model is the procedural city's (`scenes.city_model`), the views follow a path over it. `single` is its step on one
GPU, replayed from a CUDA graph. It, and the step of `tile`, defer the steps of points that are not drawn, except in
"dense" variants. Training counts statistics of densification until it stops refining. With --counts the main variants,
and gsplat, are timed once more with absolute gradients and these statistics, "counting". Before a variant is timed, its
first step is compared with `single`'s: losses of all views, norms of the gradients, and changes of parameters. Times
are the slowest rank's; medians over at least --steps steps, views in turn.

Sections: `single`; `tile`, a view a step; `batch`, a view a GPU, with rows sent while others are projected, and with
all of them at once; `modes`, a view a step in other variants (collectives, the sort over all GPUs, dense); `gsplat`,
and its distributed mode with a camera a GPU. Every figure is written to the JSON at once, failed and skipped ones with
the reason; the tables show the main ones. On a CPU: --device cpu --points 2000 --images 96x64 --quick.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.lib.rank_jobs import Job, run_jobs
from benchmarks.lib.report import write_report
from benchmarks.scaling.tile_jobs import make_worker
from benchmarks.scaling.tile_run import Mode
from benchmarks.scaling.tile_tables import COUNTING, show
from benchmarks.scenes.city_model import LENSES, CityScene
from cuda_ext.dispatch.load import build_native
from ns_multigpu.planning.quantities import parse_count, parse_size

SECTIONS = ("single", "tile", "batch", "modes", "gsplat")
MOST_VIEWS = 24
_SIZES = {"1080p": (1920, 1080), "4K": (3840, 2160), "8K": (7680, 4320)}


def image_size(text: str) -> tuple[int, int]:
    """Parse 1080p, 4K, 8K or WIDTHxHEIGHT."""
    return _SIZES[text] if text in _SIZES else parse_size(text)


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--gpus", nargs="+", type=int, help="ranks (default: 1 2 4, as far as there are GPUs)")
    parser.add_argument("--points", nargs="+", type=parse_count, default=[8_000_000, 50_000_000])
    parser.add_argument("--images", nargs="+", type=image_size, default=list(_SIZES.values()))
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--steps", type=int, default=24, help="timed steps of each way, at least")
    parser.add_argument("--views", type=int, default=8, help="views to train on")
    parser.add_argument("--blocks", type=int, default=0, help="along a side of the city (default: as the points grow)")
    parser.add_argument("--lens", choices=LENSES, default="", help="draw through one, not as a pinhole camera")
    parser.add_argument("--counts", action="store_true", help="time absolute gradients and statistics, too")
    parser.add_argument("--quick", action="store_true", help="few steps of two views, to see that it runs")
    parser.add_argument("--seconds", type=float, default=1e9, help="after so many nothing is begun any more")
    parser.add_argument("--stall", type=float, default=240.0, help="seconds after which a job counts as hung")
    parser.add_argument("--against", type=Path, help="an earlier report, whose `single` serves where it is not run")
    parser.add_argument("--json", type=Path, help="the report, rewritten after every figure")
    options = parser.parse_args(words)
    if options.gpus is None:
        options.gpus = [n for n in (1, 2, 4) if n <= (torch.cuda.device_count() if options.device == "cuda" else 2)]
    if options.device == "cuda" and max(options.gpus) > torch.cuda.device_count():
        parser.error(f"--gpus {max(options.gpus)}: there are {torch.cuda.device_count()}.")
    if not 1 <= options.views <= MOST_VIEWS:
        parser.error(f"--views {options.views}: between 1 and {MOST_VIEWS}, so that a block of steps has them all")
    if options.quick:
        options.steps, options.views = 4, 2
    return options


def prepare(options: argparse.Namespace) -> None:
    """Compile what is needed, once for all ranks; leave gsplat out if it is missing."""
    build_native("cuda")
    if "gsplat" not in options.sections:
        return
    try:
        import pytorch_msssim  # noqa: F401 - whether it is there
        from gsplat.cuda._backend import _C

        problem = "" if _C is not None else "it found no CUDA compiler"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        options.console.print(f"gsplat is left out: {problem}", markup=False, highlight=False, soft_wrap=True)
        options.sections.remove("gsplat")


def modes(device: str, ranks: int) -> list[Mode]:
    """Return the modes of a tile step, the usual one first."""
    usual = Mode() if device == "cuda" or ranks == 1 else Mode(transport="collective")
    if ranks == 1:
        return [usual]
    dense = Mode(usual.transport, lazy=False)
    found = [usual, dense]
    if usual.transport == "peer":
        found += [Mode(transport="collective"), Mode(lists="sort")]
    return found


def jobs_of(options: argparse.Namespace, ranks: int) -> list[Job]:
    """Return the jobs of `ranks` ranks."""
    jobs: list[Job] = []
    cuda = options.device == "cuda"
    for points in options.points:
        for turn, (width, height) in enumerate(options.images):
            scene = CityScene(points, width, height, options.views, options.blocks, options.lens)
            base: Job = {"scene": asdict(scene), "name": scene.name, "gpus": ranks, "steps": options.steps}
            base["estimate"] = 4.0 if cuda else 0.0
            some: list[Job] = []
            if "single" in options.sections and ranks == 1:
                some += [{"kind": "single", "way": "single" if lazy else "single, dense", "lazy": lazy, "batch": 1}
                         for lazy in (True, False)]  # fmt: skip
            for k, mode in enumerate(modes(options.device, ranks)):
                way: Job = {"kind": "tile", "mode": asdict(mode), "way": f"tile, {mode.name}"}
                if ("modes" if k else "tile") in options.sections:
                    some.append({**way, "batch": 1, "usual": k == 0})
                if k == 0 and ranks > 1 and "batch" in options.sections:
                    some.append({**way, "batch": ranks, "usual": True})
            if "gsplat" in options.sections and cuda:
                way = {"kind": "gsplat", "batch": ranks, "steps": min(options.steps, options.views)}
                some += [{**way, "way": "gsplat, fused Adam" if fused else "gsplat", "fused": fused}
                         for fused in (False, True)]  # fmt: skip
            if some and cuda:  # the first makes the images, or reads them, and the model
                making = width * height * options.views / 2e7 + (points / 1e7 if turn == 0 else 0.0)
                some[0]["estimate"] = 4.0 + making / ranks
            jobs += [{**base, "counts": False, **job} for job in some]
            if options.counts:
                known = [job for job in some if job["way"] == "single" or job["kind"] == "gsplat" or job.get("usual")]
                counted = [{**base, **job, "way": job["way"] + COUNTING, "counts": True} for job in known]
                jobs += [{**job, "estimate": base["estimate"]} for job in counted]
    return jobs


class Report:
    """The figures so far, and their file."""

    def __init__(self, options: argparse.Namespace, single: dict[str, Any]) -> None:
        self._path: Path | None = options.json
        self.results: list[Job] = []
        self.single = single
        self._head = {"benchmark": "tile", "steps": options.steps, "views": options.views}
        self.write(False)

    def add(self, job: Job, result: Job) -> None:
        kept = {key: job[key] for key in ("name", "gpus", "kind", "way", "batch", "counts")} | {
            "usual": job.get("usual", False)
        }
        size = {key: job["scene"][key] for key in ("points", "width", "height")}
        self.results.append({**kept, **size, **result})
        if job["way"] == "single" and "check" in result:
            self.single[job["name"]] = result["check"]
        self.write(False)

    def write(self, complete: bool) -> None:
        write_report(self._path, **self._head, complete=complete, results=self.results)


def main(words: list[str] | None = None) -> int:
    began = time.time()
    options = arguments(words)
    options.console = console = Console(width=None if sys.stdout.isatty() else 180)
    if options.device == "cuda":
        prepare(options)
    earlier = json.loads(options.against.read_text())["results"] if options.against else []
    report = Report(options, {r["name"]: r["check"] for r in earlier if r["way"] == "single" and "check" in r})
    report.results += [r for r in earlier if r["kind"] == "single"]
    # `single` is what all others are compared with; then the most GPUs, for time may run out.
    worlds = sorted(set(options.gpus), reverse=True)
    if "single" in options.sections and not options.against and 1 not in worlds:
        worlds.append(1)
    worlds.sort(key=lambda ranks: ranks != 1)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in worlds:
            jobs = jobs_of(options, ranks)
            if ranks == 1 and 1 not in options.gpus:
                jobs = [job for job in jobs if job["kind"] == "single"]

            def emit(number: int, result: Job, jobs: list[Job] = jobs) -> None:
                job = jobs[number]
                report.add(job, result)
                if "ms" in result and not sys.stdout.isatty():
                    return
                text = result.get("error") or result.get("skipped") or f"{result['ms']:.3f} ms"
                line = f"[{time.time() - began:.0f} s] {job['gpus']} x {job['name']} {job['way']} batch {job['batch']}"
                console.print(f"{line}: {text[-600:]}", markup=False, highlight=False, soft_wrap=True)

            shared: Job = {"folder": folder, "single": report.single}
            if jobs:
                console.print(f"[{time.time() - began:.0f} s] {len(jobs)} jobs of {ranks} ranks", markup=False)
                run_jobs(make_worker, shared, jobs, ranks, options.device, emit, began + options.seconds, options.stall)
    report.write(True)
    show(console, report.results)
    failed = [r for r in report.results if "error" in r]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
