"""Trains a capture through plain `ns-train` and `ns-eval`, in several ways side by side: PSNR, SSIM, images a second.

    python -m benchmarks.capture --runs splatfacto batch-1 batch-4 batch-4-unscaled --seeds 42 43 44 --images 15000 \\
        --json out.json -- colmap --data fox --downscale-factor 1 --eval-mode interval --eval-interval 8

A run is one of

- `splatfacto`: nerfstudio's own, one device; `splatfacto-ours`: the same with our operators in the place of gsplat's;
- `batch-D`: D devices, a view on each; `batch-DxV`: V views on each;
- `tile-D`: D devices, a view a step; `tile-DxV`: V views a step;
- one of ours with `-unscaled` behind it: learning rates do not follow the batch; with `-sqrt`: they follow it in the
  same way to the end; or with `-falling`: they fall over the run, to 0.03 of what they would be.

`wall s` is from Enter to prompt; where it goes by the run's own account is in a table of its own.

A seed is the run's and that of the order of the views: runs of one seed see the same views in the same order,
splatfacto's too. Only steps of several views have those of some steps in another order (--pipeline.level-steps).

What follows `--` is the dataparser, as `ns-train` takes it. Runs of one GPU start at once on the GPUs that --slots
lists; speeds are taken from runs that had their GPU to themselves. Those that share one are evaluated as soon as they
are trained, the others when no run is under way any more; --json has what is there after each.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from tempfile import mkdtemp
from threading import Lock
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib.report import empty_table, write_report

VARIANTS = {
    "-unscaled": ["--batch-scaling", "none"],
    "-sqrt": ["--batch-scaling", "sqrt"],
    "-falling": ["--rates-at-end", "0.03", "--rates-fall-from", "0"],
}
"""Options of a run by suffix of its name."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=["batch-2"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--images", type=int, default=15000, help="images each run sees")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--slots", nargs="+", type=int, default=[0], help="GPUs for runs of one; one listed twice is shared"
    )
    parser.add_argument("--also-at", type=int, default=0, help="splatfacto is evaluated after so many images as well")
    parser.add_argument("--options", default="", help="further options of ns-train for all runs, as one string")
    parser.add_argument("--output", type=Path, help="folder for the runs; by default a temporary one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("dataparser", nargs="+", help="after --: the dataparser and its options")
    return parser.parse_args()


def command(run: str, seed: int, options: argparse.Namespace, output: Path) -> list[str]:
    """Return the command line of one run."""
    if is_peer(run):
        words = ["-m", "benchmarks.captures.splatfacto_baseline", "--images", str(options.images), "--seed", str(seed)]
        words += ["--also-at", str(options.also_at), f"--options={options.options}"]
        words += ["--operators", "ours"] if run.endswith("-ours") else []
        return [sys.executable, *words, "--output", str(output), "--", *options.dataparser]
    match = re.fullmatch(rf"(batch|tile)-(\d+)(?:x(\d+))?({'|'.join(VARIANTS)})?", run)
    if match is None:
        raise SystemExit(f"--runs: there is no run {run!r}; those that there are: --help")
    strategy, devices, views, otherwise = match.groups()
    words = [
        "-m",
        "nerfstudio.scripts.train",
        f"splatfacto-{strategy}",
        "--output-dir",
        str(output),
        "--timestamp",
        "run",
    ]
    words += ["--experiment-name", "capture", "--machine.device-type", options.device]
    words += ["--machine.num-devices", devices, "--machine.seed", str(seed)]
    words += ["--pipeline.datamanager.train-cameras-sampling-seed", str(seed)]
    if views is not None:
        words += [f"--pipeline.views-per-{'rank' if strategy == 'batch' else 'step'}", views]
    words += ["--max-num-images", str(options.images), "--vis", "tensorboard", "--logging.steps-per-log", "250"]
    words += ["--steps-per-eval-image", "0", "--steps-per-eval-all-images", "0"]
    words += [] if "--recipe" in options.options else ["--recipe", "splatfacto"]
    words += VARIANTS.get(otherwise, [])
    return [sys.executable, *words, *options.options.split(), *options.dataparser]


def is_peer(run: str) -> bool:
    """Return whether a run is one of nerfstudio's own method."""
    return run in ("splatfacto", "splatfacto-ours")


def environment(gpu: int | None, sharers: int) -> dict[str, str]:
    """Return the environment of a run that sees one GPU, or all, and its share of the cores."""
    result = dict(os.environ)
    if gpu is not None:
        result["CUDA_VISIBLE_DEVICES"] = str(gpu)
        result.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // sharers)))
    return result


def train(run: str, seed: int, options: argparse.Namespace, folder: Path, gpu: int | None) -> dict[str, Any]:
    """Train and return the run's summary. Splatfacto evaluates in the same process."""
    output = folder / f"{run}-{seed}"
    start = time.perf_counter()
    with (folder / f"{run}-{seed}.log").open("w") as log:
        where = environment(gpu, len(options.slots))
        subprocess.run(command(run, seed, options, output), env=where, stdout=log, stderr=log, check=True)
    wall = time.perf_counter() - start
    summary = output / "result.json" if is_peer(run) else run_folder(output) / "training_summary.json"
    result = json.loads(summary.read_text()) | {"run": run, "seed": seed, "wall_s": wall}
    if not is_peer(run):  # whose summary has them
        result["course"] = trajectory(summary.with_name("metrics.jsonl"))
    Console().print(
        f"{run} seed {seed}: {result['images_per_s']:.1f} img/s, {result['gaussians']} Gaussians, {wall:.0f} s"
    )
    return result


def trajectory(metrics: Path) -> list[dict[str, float]]:
    """Return figures of each log line of one of our runs.

    These are the Gaussians, those duplicated, split and pruned since the previous line, and milliseconds a step.
    """
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    kept = ("step", "duplicated", "split", "pruned", "gaussians", "step_ms", "compute_ms", "exchange_ms", "waiting_ms")
    return [{k: row[k] for k in kept if k in row} for row in rows]


def run_folder(output: Path) -> Path:
    """Return the folder of one of our runs."""
    return next((output / "capture").glob("splatfacto-*")) / "run"


def evaluate(result: dict[str, Any], options: argparse.Namespace, folder: Path, gpu: int | None) -> dict[str, Any]:
    """Return the result with held-out PSNR and SSIM of ns-eval."""
    if "psnr" not in result:
        output = folder / f"{result['run']}-{result['seed']}"
        words = ["-m", "nerfstudio.scripts.eval", "--load-config", str(run_folder(output) / "config.yml")]
        with (folder / f"{output.name}.log").open("a") as log:
            command = [sys.executable, *words, "--output-path", str(output / "eval.json")]
            where = environment(gpu, len(options.slots))
            subprocess.run(command, env=where, stdout=log, stderr=log, check=True)
        scores = json.loads((output / "eval.json").read_text())["results"]
        result = result | {"psnr": scores["psnr"], "ssim": scores["ssim"]}
    Console().print(f"{result['run']} seed {result['seed']}: {result['psnr']:.2f} dB, SSIM {result['ssim']:.4f}")
    return result


def parts_table(runs: Sequence[str], results: Sequence[dict[str, Any]]) -> Table | None:
    """Return the runs' own timings, seconds by part, means over the runs without concurrent ones."""
    columns = {
        run: [r["startup_ms"] for r in results if r["run"] == run and r["alone"] and "startup_ms" in r] for run in runs
    }
    columns = {run: rows for run, rows in columns.items() if rows}
    if not columns:
        return None
    table = empty_table("seconds by part", ("part", *columns))
    for part in dict.fromkeys(part for rows in columns.values() for row in rows for part in row):
        means = [statistics.mean(row.get(part, 0.0) for row in rows) / 1e3 for rows in columns.values()]
        table.add_row(part, *(f"{mean:.2f}" for mean in means))
    return table


def results_table(options: argparse.Namespace, results: Sequence[dict[str, Any]]) -> Table:
    """Return a row of means over seeds for each run that has a result."""
    heads = ("run", "seeds", "PSNR", "spread", "SSIM", "images/s", "training s", "wall s", "Gaussians", "MB sent/step")
    table = empty_table(f"{options.images} images, {' '.join(options.dataparser)}", heads)
    for run in options.runs:
        rows = [r for r in results if r["run"] == run]
        if not rows:
            continue
        mean = {k: statistics.mean(r[k] for r in rows) for k in ("psnr", "ssim")}
        timed = [r for r in rows if r["alone"]] or rows
        mean |= {k: statistics.mean(r[k] for r in timed) for k in ("images_per_s", "train_seconds", "wall_s")}
        spread = max(r["psnr"] for r in rows) - min(r["psnr"] for r in rows)
        table.add_row(
            run,
            str(len(rows)),
            f"{mean['psnr']:.2f}",
            f"{spread:.2f}",
            f"{mean['ssim']:.4f}",
            f"{mean['images_per_s']:.1f}",
            f"{mean['train_seconds']:.0f}",
            f"{mean['wall_s']:.1f}",
            f"{statistics.mean(r['gaussians'] for r in rows):,.0f}",
            f"{statistics.mean(r['bytes_per_step'] for r in rows) / 1e6:.1f}",
        )
    return table


def main() -> None:
    options = arguments()
    jobs = [(run, seed) for seed in options.seeds for run in options.runs]
    for job in jobs:  # a name that is none is to be found before the first run, not after an hour
        command(*job, options, Path())
    folder = options.output or Path(mkdtemp(prefix="capture-"))
    folder.mkdir(parents=True, exist_ok=True)
    of_one_gpu = re.compile(r"splatfacto.*|(batch|tile)-1([x-].*)?")
    alone = [job for job in jobs if options.device == "cpu" or not of_one_gpu.fullmatch(job[0])]
    shared = [job for job in jobs if job not in alone]
    gpus: Queue[int] = Queue()
    for gpu in options.slots:
        gpus.put(gpu)
    finished: list[dict[str, Any]] = []
    one_at_a_time = Lock()

    def train_shared(run: str, seed: int, gpu: int | None) -> dict[str, Any]:
        apart = gpu is None or options.slots.count(gpu) == 1
        result = train(run, seed, options, folder, gpu) | {"alone": apart}
        if not apart:  # its neighbours' speeds count for nothing
            result = evaluate(result, options, folder, gpu)
        with one_at_a_time:
            finished.append(result)
            keep(finished)
        return result

    def attempted(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return work()
        except subprocess.CalledProcessError as error:  # the others are worth having
            Console().print(f"A run failed; see the logs in {folder}. {error}", soft_wrap=True)
            return {}

    def on_a_gpu(work: Callable[[int | None], dict[str, Any]]) -> dict[str, Any]:
        gpu = gpus.get()
        try:
            return attempted(partial(work, gpu if options.device == "cuda" else None))
        finally:
            gpus.put(gpu)

    def keep(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        results = [result for result in results if result]
        write_report(options.json, results=results)
        return results

    with ThreadPoolExecutor(len(options.slots)) as pool:
        results = keep(list(pool.map(on_a_gpu, [partial(train_shared, *job) for job in shared])))
        for job in alone:
            result = attempted(partial(train, *job, options, folder, None))
            results = keep([*results, result and result | {"alone": True}])
        results = keep(list(pool.map(on_a_gpu, [partial(evaluate, result, options, folder) for result in results])))

    Console(width=140).print(results_table(options, results))
    if parts := parts_table(options.runs, results):
        Console(width=140).print(parts)
    if len(results) < len(jobs):
        raise SystemExit(f"{len(jobs) - len(results)} of {len(jobs)} runs failed.")


if __name__ == "__main__":
    main()
