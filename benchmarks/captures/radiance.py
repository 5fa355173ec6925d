"""Radiance fields on one capture, side by side: PSNR at the same number of rays, rays a second, parameters, memory.

    python -m benchmarks.captures.radiance --ways nerfacto xl-1 xl-2 xl-4 --steps 2000 --seconds 30 --at 500 1000 \\
        --json out.json -- colmap --data fox --downscale-factor 1 --eval-mode interval --eval-interval 8

A way is one of

- `nerfacto`: nerfstudio's own, on one GPU; `nerfacto-xG`: on G GPUs, in DDP;
- `xl-C`: `nerfacto-xl` with C cells on one GPU; `xl-CxG`: on G GPUs;
- `ddp-CxG`: the same with `--pipeline.model.spread ddp`;
- `mega-CxG`, `block-CxG`: Mega-NeRF and Block-NeRF (`benchmarks.baselines.separate_fields`).

Behind its name a way may have options of its own, after a colon: "xl-2:--pipeline.model.log2-hashmap-size 18".
Ways are run one after the other, each in processes of its own. A way ends after --steps steps or --seconds seconds of
training. Of one that fails, or outlasts --limit, what had been evaluated is kept. What follows `--` is the dataparser,
as `ns-train` takes it. A city to train on: `ns-multigpu city`.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib.environment import describe

EVALUATIONS = "courses.json"
"""The file, in a way's folder, with what has been evaluated so far."""
_WAY = re.compile(r"(nerfacto|(?P<spread>xl|ddp|mega|block)-(?P<cells>\d+))(x(?P<gpus>\d+))?(:(?P<options>.*))?")


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
    words += ["--views", str(options.views), "--seed", str(options.seed), "--output", str(output)]
    words += [f"--options={extra}"] if extra else []
    words += ["--at", *map(str, options.at)] if options.at else []
    words += ["--profile"] if options.profile else []
    return [*words, "--", *options.dataparser]


def run(way: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the measurements of a method, or the reason why there are none."""
    output = folder / re.sub(r"\W+", "-", way)
    output.mkdir(parents=True)
    start = time.perf_counter()
    with (output / "log.txt").open("w") as log:
        try:
            code = subprocess.run(
                command(way, options, output), stdout=log, stderr=subprocess.STDOUT, check=False, timeout=options.limit
            ).returncode
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
    """The rows for people to read."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["nerfacto", "xl-1", "xl-2"])
    parser.add_argument("--steps", type=int, default=2000, help="of each way, at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="of training of each way, about at most")
    parser.add_argument("--limit", type=float, default=None, help="seconds after which a way is ended, all included")
    parser.add_argument("--at", type=int, nargs="*", default=[], help="evaluate after so many steps too, off the clock")
    parser.add_argument("--views", type=int, default=0, help="held-out views to evaluate, at most; 0: all")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--options", default="", help="further options of ns-train for all ways, as one string")
    parser.add_argument("--profile", action="store_true", help="see where five more steps of each way spend their time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("dataparser", nargs="+", help="after --: the dataparser and its options")
    options = parser.parse_args()
    folder, rows, console = Path(mkdtemp(prefix="radiance-")), list[dict[str, Any]](), Console(soft_wrap=True)
    for way in options.ways:
        command(way, options, folder)  # a wrong name is found at once
    for way in options.ways:
        rows.append(run(way, options, folder))
        console.print(rows[-1].get("failed", f"{way}: done in {rows[-1]['wall_s']:.0f} s"), markup=False)
        if options.json:
            options.json.write_text(json.dumps({**describe(), "rows": rows}, indent=2) + "\n")
    console.print(table(rows))
    if any("failed" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
