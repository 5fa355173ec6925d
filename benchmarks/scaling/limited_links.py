"""Measure images a second of the strategies on two GPUs, over their own links and over a link as slow as a network.

    python -m benchmarks.scaling.limited_links --strategies tile locality pixel --gbit none 25 10 \
        --points 2M 8M --json FILE

Each of two ranks has a GPU (on a CPU: `--device cpu`, for tiny numbers). Without a limit they are one machine, and use
peer memory where there is any, as a user's run would. With a limit they pretend to be two
machines (NS_MULTIGPU_MACHINES=2). Then all exchanges are collectives over rate-limited TCP sockets of the loopback;
`links.limiting` lists the model's limits. "free" is the same without the limit: the cost of sockets alone.

Steps are those of `ns-train` on such machines, with splatfacto's options and `--views` views a step. The model is the
complete procedural city. It does not change: no refinements, learning rates next to zero. Images are noise, so no
pictures are rendered (`links.bare_city`). Of pixel "mixed" has views in random order
(`--pipeline.pixel.level-steps False`) instead of those that conflict least, "hide" leaves out parts of cells that
contribute nothing (`--pipeline.pixel.hide True`), and "at-once" exchanges the pixels of a batch at once instead of in
halves.

A row's times are the slowest rank's, over `--blocks` blocks of `--steps` steps, behind `--warm` steps. "drawing" is the
part of that in which each GPU computes; "level" how even the pixels are that GPUs draw. The first rows are the
rates of 64 MB from one rank to the other, and of 64 MB in both directions at once. With gloo the directions alternate,
also over a real link: its ready message queues behind its own data.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.lib.lockstep import over_ranks
from benchmarks.lib.rank_jobs import Job, run_jobs
from benchmarks.lib.report import empty_table, write_report
from benchmarks.scaling.links.limiting import limit, variables, why_none
from benchmarks.scaling.links.training import STRATEGIES, VARIANTS, Timed
from benchmarks.scenes.city_model import CityScene
from cuda_ext.dispatch.load import build_native
from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.machines import PRETEND_MACHINES
from ns_multigpu.core.dist.world import World
from ns_multigpu.planning.quantities import parse_count, parse_size

_RAW_BYTES = 64_000_000
_RAW_TURNS = 5
_AGAIN = 4
"""Steps before the first block, where a run goes on over another link."""


def link(text: str) -> float | None:
    """Return Gbit/s; "none" means no limit, 0 ("free") sockets without one."""
    if text in ("none", "free"):
        return None if text == "none" else 0.0
    try:
        gbit = float(text)
    except ValueError:
        gbit = 0.0
    if not 0 < gbit < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give none, free, or Gbit/s above 0")
    return gbit


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--strategies", nargs="+", choices=(*STRATEGIES, *VARIANTS), default=[*STRATEGIES[1:], "mixed"])
    parser.add_argument(
        "--gbit", nargs="+", type=link, default=[None, 25.0, 10.0], help="none, free, or Gbit/s each way"
    )
    parser.add_argument("--points", nargs="+", type=parse_count, default=[2_000_000, 8_000_000])
    parser.add_argument("--image", type=parse_size, default=(1920, 1080), help="WIDTHxHEIGHT")
    parser.add_argument("--kind", choices=("aerial", "street"), default="aerial", help="of views")
    parser.add_argument("--capture", type=int, default=24, help="views to train on")
    parser.add_argument("--views", type=int, default=4, help="of a step")
    parser.add_argument("--warm", type=int, default=24, help="steps before the first block")
    parser.add_argument("--steps", type=int, default=24, help="of a block")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="after so many nothing is begun any more")
    parser.add_argument("--stall", type=float, default=120.0, help="seconds after which a run counts as hung")
    parser.add_argument("--json", type=Path, help="file for the results, written after every figure")
    options = parser.parse_args(words)
    if options.device == "cuda" and torch.cuda.device_count() < 2:
        parser.error(f"two GPUs are needed, and there are {torch.cuda.device_count()}: give --device cpu")
    if any(gbit is not None for gbit in options.gbit) and (reason := why_none()):
        parser.error(reason)
    return options


def make_worker(world: World, shared: Job) -> Callable[[Job], Job]:
    """Job worker: see `lib.rank_jobs`. `shared`: folder, warm, steps, blocks."""
    return _Worker(world, shared)


class _Worker:
    """Keeps the run of the last job, for the next one may be the same over another link."""

    def __init__(self, world: World, shared: Job) -> None:
        self._world, self._shared = world, shared
        self._run: tuple[Any, Timed] | None = None

    def __call__(self, job: Job) -> Job:
        if job["gbit"] is not None:
            limit(job["gbit"])
        if job["way"] == "raw":
            return self._raw()
        of, shared = {key: value for key, value in job.items() if key not in ("gbit", "link", "estimate")}, self._shared
        made, warm = time.perf_counter(), _AGAIN
        if self._run is None or self._run[0] != of:
            self._run, warm = None, shared["warm"]
            gc.collect()
            if self._world.device.type == "cuda":
                torch.cuda.empty_cache()
            scene, folder = CityScene(**job["scene"]), Path(shared["folder"])
            self._run = of, Timed(self._world, job["way"], scene, job["kind"], job["views"], folder)
        made, run = time.perf_counter() - made, self._run[1]
        run.take(warm)
        return {"setup_seconds": round(made, 2), **run.time(shared["steps"], shared["blocks"])}

    def _raw(self) -> Job:
        """Return the Gbit/s of 64 MB, the median of some rounds: from rank 0 to 1, and in both directions at once."""
        world, count = self._world, _RAW_BYTES // 4
        source, into = (torch.zeros(count, device=world.device) for _ in range(2))
        found: Job = {}
        for name, senders in (("one_way_gbit", (0,)), ("both_ways_gbit", (0, 1))):
            out, here = ([count if rank != world.rank and sender in senders else 0 for rank in range(2)]
                         for sender in (world.rank, 1 - world.rank))  # fmt: skip
            rates: list[float] = []
            for _ in range(_RAW_TURNS + 1):
                barrier(world)
                began = time.perf_counter()
                dist.all_to_all_single(into[: sum(here)], source[: sum(out)], here, out, group=world.group)
                if world.device.type == "cuda":
                    torch.cuda.synchronize()
                took = max(row[0] for row in over_ranks([time.perf_counter() - began], world))
                rates.append(8 * _RAW_BYTES / took / 1e9)
            found[name] = sorted(rates[1:])[_RAW_TURNS // 2]
        return found


def jobs_of(options: argparse.Namespace, links: list[float | None]) -> list[Job]:
    """Return the jobs of ranks in one environment, which measure these links one after the other with the same run."""
    named: list[Job] = [{"gbit": gbit, "link": link_name(gbit)} for gbit in links]
    jobs: list[Job] = [{"way": "raw", **one} for one in named]
    for points in options.points:
        scene = asdict(CityScene(points, *options.image, views=options.capture))
        for way in options.strategies:
            base: Job = {"way": way, "scene": scene, "kind": options.kind, "views": options.views}
            jobs += [{**base, **one} for one in named]
    return jobs


def link_name(gbit: float | None) -> str:
    """Return the name of a link in tables."""
    return "own links" if gbit is None else "sockets" if gbit == 0 else f"{gbit:g} Gbit/s"


@contextmanager
def environment(more: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes started within the context."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def table(done: list[Job]) -> Table:
    """Return a table with a row for each run."""
    measured = ("images/s", "ms a step", "MB a step", "on the wire", "waits", "drawing", "level")
    shown = empty_table(None, ("Gaussians", "strategy", "link", *measured), left=(1, 2))
    for one in done:
        if "one_way_gbit" in one:
            shown.add_row("", "64 MB one way", one["link"], f"{one['one_way_gbit']:.2f} Gbit/s")
            shown.add_row("", "all-to-all, 64 MB", one["link"], f"{one['both_ways_gbit']:.2f} Gbit/s")
            continue
        points = f"{one['scene']['points']:,}" if "scene" in one else ""
        if "ms" not in one:
            shown.add_row(
                points, one["way"], one["link"], (one.get("error") or one["skipped"]).strip().splitlines()[-1]
            )
            continue
        wire, level = one.get("wire"), one["figures"].get("drawing_level")
        numbers = (one["images_per_s"], one["ms"], one["bytes"] / 1e6)
        shown.add_row(
            points, one["way"], one["link"], *(f"{number:.2f}" for number in numbers),
            f"{max(wire) / 1e6:.2f}" if wire else "", f"{max(one['waited']):.0%}" if wire else "",
            " ".join(f"{part:.0%}" for part in one["compute"]), "" if level is None else f"{level:.2f}",
        )  # fmt: skip
    return shown


def main(words: list[str] | None = None) -> int:
    began, options = time.time(), arguments(words)
    cuda = options.device == "cuda"
    build_native("cuda" if cuda else "cpu")
    console, done = Console(width=None if sys.stdout.isatty() else 160), list[Job]()
    with tempfile.TemporaryDirectory(prefix="limited-links-") as folder:
        shared: Job = {name: getattr(options, name) for name in ("warm", "steps", "blocks")} | {"folder": folder}
        groups = [[gbit for gbit in options.gbit if gbit is None], [gbit for gbit in options.gbit if gbit is not None]]
        for links in filter(None, groups):
            jobs = jobs_of(options, links)

            def emit(number: int, result: Job, jobs: list[Job] = jobs) -> None:
                done.append({**jobs[number], **result})
                message = result.get("error") or result.get("skipped")
                text = message or f"{result.get('images_per_s', result.get('one_way_gbit')):.2f}"
                line = f"[{time.time() - began:.0f} s] {jobs[number]['link']} {jobs[number]['way']}: {text}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
                write_report(options.json, benchmark="limited_links", options=_plain(options), runs=done)

            limited = {**variables(cuda=cuda), PRETEND_MACHINES: "2"} if links[0] is not None else {}
            with environment(limited):
                run_jobs(make_worker, shared, jobs, 2, options.device, emit, began + options.seconds, options.stall)
    console.print(table(done))
    return 1 if any("error" in one for one in done) else 0


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}


if __name__ == "__main__":
    sys.exit(main())
