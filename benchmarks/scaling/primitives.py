"""Measure each primitive with each strategy: images a second, bytes sent by a step (as Gaian's figure 10), and bytes of
a point and of its splat (as its table 3).

    python -m benchmarks.scaling.primitives [--devices 1 2] [--kinds 3dgs 2dgs convex 4dgs] [--json FILE]
        [--device cpu] [--capture FOLDER] [-- OPTIONS of the city]

A run is `ns-train splatfacto-STRATEGY --pipeline.model.primitive KIND` on the procedural city, a view a device and
step, without densification, so that all runs have as many points. Images a second are those between the first row of
metrics and the last, bytes are the mean of a rank's sent bytes over the same steps, including forwarded images. With
4dgs cars move, but not in a capture that --capture names: a folder in COLMAP's layout, instead of the city, which each
run would render again. Normal losses of 2dgs count from the first image on, but not with `pixel`, which does not
support them.

On one device nothing is sent. Speeds on a CPU say nothing of GPUs: there `--device cpu` is for the bytes.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks.lib.report import write_report
from ns_multigpu.core.schema import floats
from ns_multigpu.primitives.registry import PRIMITIVES, RenderOptions

STRATEGIES = ("batch", "tile", "locality", "pixel")
PAPERS = {"3dgs": 40, "2dgs": 80, "convex": 116}
"""Bytes of what a point becomes in a view, as Gaian exchanges it (Table 3)."""
MODEL = "--pipeline.model."


@dataclass(frozen=True)
class Measured:
    """A run: means over its steps behind the first row of metrics."""

    kind: str
    strategy: str
    devices: int
    images_a_second: float
    bytes_a_step: float
    points: int


def command(kind: str, strategy: str, devices: int, options: argparse.Namespace, output: Path) -> list[str]:
    """Return the training command line."""
    steps = options.steps
    from_folder = ("colmap", "--data", str(options.capture), "--colmap-path", "sparse/0", "--downscale-factor", "1")
    return [
        *(sys.executable, "-W", "ignore", "-m", "nerfstudio.scripts.train", f"splatfacto-{strategy}"),
        *("--machine.device-type", options.device, "--machine.num-devices", str(devices)),
        *("--output-dir", str(output), "--timestamp", "run", "--vis", "tensorboard", "--steps-per-save", "1000000"),
        *("--max-num-images", str(steps * devices), "--logging.steps-per-log", str(max(steps // 4, 1))),
        *("--steps-per-eval-batch", "0", "--steps-per-eval-image", "0", "--steps-per-eval-all-images", "1000000"),
        *("--recipe", "splatfacto"),
        *("--steps-per-checksum", "0", MODEL + "num-downscales", "0", MODEL + "warmup-length", "100000000"),
        *(MODEL + "sh-degree-interval", "1", MODEL + "primitive", kind),
        *((MODEL + "normal-loss-start", "0") if kind == "2dgs" and strategy != "pixel" else ()),
        *((MODEL + "normal-loss", "0") if kind == "2dgs" and strategy == "pixel" else ()),
        *(() if strategy == "batch" else ("--pipeline.views-per-step", str(devices))),
        *(from_folder if options.capture else ("city", "--time-varying", str(kind == "4dgs"), *options.city)),
    ]


def measure(kind: str, strategy: str, devices: int, options: argparse.Namespace) -> Measured:
    """Train, and read what the run has written.

    Raises:
        RuntimeError: the run failed; it says what it printed.
    """
    with TemporaryDirectory(prefix="kinds-") as folder:
        words = command(kind, strategy, devices, options, Path(folder))
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        files = list(Path(folder).glob("*/*/run/metrics.jsonl"))
        if done.returncode or not files:
            # A fatal error of Python's lists all modules of the process behind what matters.
            said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("Extension modules"))
            raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{said[-6000:]}")
        rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    rest = rows[1:]
    steps = [int(row["step"] - before["step"]) for before, row in zip(rows, rest, strict=False)]

    def mean(name: str) -> float:
        return sum(row[name] * length for row, length in zip(rest, steps, strict=True)) / sum(steps)

    return Measured(
        kind, strategy, devices, devices * 1e3 / mean("step_ms"), mean("bytes_per_step"), int(rows[-1]["gaussians"])
    )


def sizes_table() -> Table:
    """Return bytes of a point, of its rows as collectives send them, ids included, and of their gradients."""
    shown = Table("kind", "a point", "its row", "gradients back", "Gaian's row")
    for name, kind in PRIMITIVES.items():
        kernels = kind.make(RenderOptions(3)).kernels()
        assert kernels is not None, f"{name} has operators"
        wire = kernels.wire(half=False, slots=False)
        bytes_ = (4 * floats(kind.schema, 3), 4 * wire.row_words, 4 * wire.gradient_words)
        shown.add_row(name, *map(str, bytes_), str(PAPERS.get(name, "")))
    return shown


def runs_table(done: Sequence[Measured], device: str) -> Table:
    """Return a row for each primitive and number of devices: images a second (on GPUs) and bytes a step by strategy."""
    shown = Table("kind", "devices", *STRATEGIES)
    for kind, devices in dict.fromkeys((one.kind, one.devices) for one in done):
        cells = {one.strategy: one for one in done if (one.kind, one.devices) == (kind, devices)}
        texts = [_cell(cells.get(strategy), device) for strategy in STRATEGIES]
        shown.add_row(kind, str(devices), *texts)
    return shown


def _cell(one: Measured | None, device: str) -> str:
    if one is None:
        return ""
    sent = f"{one.bytes_a_step / 1e6:.2f} MB"
    return sent if device == "cpu" else f"{one.images_a_second:.0f} images/s, {sent}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(PRIMITIVES), default=list(PRIMITIVES))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--json", type=Path, help="file for the results, written after each run")
    parser.add_argument("--capture", type=Path, help="folder in COLMAP's layout, in the place of the city")
    parser.add_argument("city", nargs="*", help="options of the city, behind --")
    options = parser.parse_args()
    if options.capture and options.city:
        parser.error("give --capture or the options of a city, not both")
    if options.capture and not (options.capture / "sparse" / "0").is_dir():
        parser.error(f"--capture {options.capture}: there is no sparse/0 in it; give a folder in COLMAP's layout")
    console, done = Console(width=None if sys.stdout.isatty() else 140), list[Measured]()
    console.print(sizes_table())
    for devices in options.devices:
        for kind in options.kinds:
            for strategy in options.strategies if devices > 1 else options.strategies[:1]:
                done.append(measure(kind, strategy, devices, options))
                write_report(options.json, runs=[asdict(one) for one in done])
    console.print(runs_table(done, options.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
