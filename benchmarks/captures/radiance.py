"""Radiance fields on one capture, side by side: PSNR at the same number of rays, rays a second, parameters, memory.

    python -m benchmarks.captures.radiance --ways nerfacto xl-1 xl-2 xl-4 --steps 2000 --seconds 30 --at 500 1000 \\
        --json out.json -- colmap --data fox --downscale-factor 1 --eval-mode interval --eval-interval 8

A way is one of

- `nerfacto`: nerfstudio's own, on one GPU; `nerfacto-xG`: on G GPUs, in DDP;
- `xl-C`: `nerfacto-xl` with C cells on one GPU; `xl-CxG`: on G GPUs;
- `ddp-CxG`: the same with `--pipeline.model.spread ddp`;
- `mega-CxG`, `block-CxG`: Mega-NeRF and Block-NeRF (`benchmarks.baselines.separate_fields`).

Behind its name a way may have options of its own, after a colon: "xl-2:--pipeline.model.log2-hashmap-size 18".
It may have a seed of its own as well: "xl-2@43". Ways are run in their order, each in processes of its own: one after
the other, or --at-once of them on each of --gpus (ways of one GPU; their speeds mean nothing then). A way ends after
--steps steps or --seconds seconds of training. Of one that fails, or outlasts --limit, what had been evaluated is kept.
What follows `--` is the dataparser, as `ns-train` takes it. A city to train on: `ns-multigpu city`.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkdtemp
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib.report import write_report
from ns_multigpu.plugin.capture.colmap import look_at

EVALUATIONS = "courses.json"
"""The file, in a way's folder, with what has been evaluated so far."""
_SHORTEST = 30.0
"""Seconds before --deadline at which no more ways are started."""
_WAY = re.compile(
    r"(nerfacto|(?P<spread>xl|ddp|mega|block)-(?P<cells>\d+))(x(?P<gpus>\d+))?(@(?P<seed>\d+))?(:(?P<options>.*))?"
)


def command(way: str, options: argparse.Namespace, output: Path) -> list[str]:
    """Return the command line that runs a method.

    Raises:
        SystemExit: there is no such way.
    """
    found = _WAY.fullmatch(way.replace("nerfacto-x", "nerfactox"))
    if found is None:
        raise SystemExit(f"--ways: there is no way {way!r}; those that there are: --help")
    gpus, cells = int(found["gpus"] or 1), found["cells"]
    words = [sys.executable]
    if gpus > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    words += ["-m", "benchmarks.captures.radiance_run", "--method"]
    spread = found["spread"]
    separate = spread in ("mega", "block")
    words += [f"nerfacto-{spread}" if separate else "nerfacto-xl" if cells else "nerfacto"]
    own = [f"--pipeline.model.cells {cells}"] if cells else []
    own += [f"--pipeline.model.spread {spread}"] if cells and not separate else []
    extra = " ".join([*own, options.options, found["options"] or ""]).strip()
    words += ["--device", options.device, "--steps", str(options.steps), "--seconds", str(options.seconds)]
    words += ["--views", str(options.views), "--seed", found["seed"] or str(options.seed), "--output", str(output)]
    words += [f"--options={extra}"] if extra else []
    words += ["--at", *map(str, options.at)] if options.at else []
    words += ["--profile"] if options.profile else []
    words += ["--truth", str(options.truth)] if options.truth else []
    return [*words, "--", *options.dataparser]


def run(
    way: str, options: argparse.Namespace, folder: Path, gpu: int | None = None, limit: float | None = None
) -> dict[str, Any]:
    """Return the measurements of a method, or the reason why there are none.

    Args:
        gpu: the one that it may use; None for all. limit: seconds, all included; None for any.
    """
    output = folder / re.sub(r"\W+", "-", way)
    output.mkdir(parents=True)
    here = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    start = time.perf_counter()
    with (output / "log.txt").open("w") as log:
        try:
            code = subprocess.run(
                command(way, options, output), stdout=log, stderr=subprocess.STDOUT, check=False,
                timeout=limit, env={**os.environ, **here},
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = -1
    wall = time.perf_counter() - start
    file = output / "result.json"
    if code or not file.exists():
        looks = output / EVALUATIONS
        evaluations = json.loads(looks.read_text()) if looks.exists() else []
        said = (output / "log.txt").read_text()[-3000:]
        return {"way": way, "failed": said, "code": code, "wall_s": wall, "courses": evaluations}
    return {"way": way, "wall_s": wall, **json.loads(file.read_text())}


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    shown = Table("way", "steps", "rays/s", "ms/step", "parameters", "MiB", "PSNR by rays (seconds)")
    for row in rows:
        trajectory = [f"{c['psnr']:.2f} at {c['rays'] / 1e6:.2f} M ({c['seconds']:.0f})" for c in row["courses"]]
        if "failed" in row:
            shown.add_row(row["way"], f"failed, exit code {row['code']}", *[""] * 4, ", ".join(trajectory))
            continue
        speed = [f"{row.get(key, 0):,.{digits}f}" for key, digits in (("rays_per_s", 0), ("ms_per_step", 1))]
        shown.add_row(
            row["way"],
            str(row["steps"]),
            *speed,
            f"{row['parameters']:,}",
            f"{row['peak_mib']:,.0f}",
            ", ".join(trajectory),
        )
    return shown


def in_turn(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run all ways, on GPUs as they become free, and yield the results as they come.

    Args:
        options: see `main`. folder: of logs.
    """
    begun, free = time.perf_counter(), SimpleQueue[int | None]()
    for gpu in options.gpus * options.at_once or [None]:
        free.put(gpu)

    def taken(way: str) -> dict[str, Any] | None:
        gpu = free.get()
        try:
            left = math.inf if options.deadline is None else options.deadline - (time.perf_counter() - begun)
            if left < _SHORTEST:
                return None
            limit = min(left, options.limit or math.inf)
            return run(way, options, folder, gpu, None if limit == math.inf else limit)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(free.qsize()) as pool:
        started = [pool.submit(taken, way) for way in options.ways]
        for done in as_completed(started):
            if (row := done.result()) is not None:
                yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["nerfacto", "xl-1", "xl-2"])
    parser.add_argument("--steps", type=int, default=2000, help="of each way, at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="of training of each way, about at most")
    parser.add_argument("--limit", type=float, default=None, help="seconds after which a way is ended, all included")
    parser.add_argument("--at", type=int, nargs="*", default=[], help="evaluate after so many steps too, off the clock")
    parser.add_argument("--views", type=int, default=0, help="held-out views to evaluate, at most; 0: all")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--gpus", type=int, nargs="+", default=[], help="numbers of GPUs, for ways of one GPU")
    parser.add_argument("--deadline", type=float, default=None, help="seconds in all; later ways are left out")
    parser.add_argument("--at-once", type=int, default=1, help="ways on each of --gpus at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--options", default="", help="further options of ns-train for all ways, as one string")
    parser.add_argument("--profile", action="store_true", help="see where five more steps of each way spend their time")
    parser.add_argument("--truth", type=Path, help="a capture with the true poses of training views, to measure errors")
    parser.add_argument("--json", type=Path)
    parser.add_argument("dataparser", nargs="+", help="after --: the dataparser and its options")
    options = parser.parse_args()
    if options.truth and (problems := look_at(options.truth / "sparse" / "0").problems):
        parser.error(f"--truth: {problems[0]}")
    folder, rows, console = Path(mkdtemp(prefix="radiance-")), list[dict[str, Any]](), Console(soft_wrap=True)
    for way in options.ways:
        words = command(way, options, folder)  # a wrong name is found at once
        if options.gpus and "torch.distributed.run" in words:
            parser.error(f"--gpus: {way} is run on several GPUs")
    for row in in_turn(options, folder):
        rows.append(row)
        console.print(row.get("failed", f"{row['way']}: done in {row['wall_s']:.0f} s"), markup=False)
        write_report(options.json, rows=rows)
    console.print(table(rows))
    if any("failed" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
