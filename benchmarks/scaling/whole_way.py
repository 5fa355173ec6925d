"""The whole way of a large model through plain commands: grown from seed points, killed, resumed, looked at, exported.

    python -m benchmarks.captures.splat_city --output CITY --blocks 7 --views 5000 --width 1920 --height 1080 \\
        --gaussians 40000000 --seed-points 2000000
    python -m benchmarks.scaling.whole_way --capture CITY --output OUT --gpus 2 --largest 60M --smaller 3M 15M \\
        --images 16000 --json FILE

The largest model is trained by `splatfacto-tile`, two views a step, and saved in the background. It is killed after its
first checkpoint from image --kill-from on, and resumes. The smaller models are trained side by side before it by
`splatfacto-batch`, a GPU and two views a step each. Host memory is that of the whole machine, so leave it alone.
--json is rewritten after every command, so a call that is cut short leaves what it has. On CPUs: --device cpu.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.report import write_report
from ns_multigpu.planning.quantities import parse_count

VIEWS_A_STEP = 2


def memory_in_use() -> float:
    """Return the host's memory that programs cannot get, GiB."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(lines["MemTotal"].split()[0]) - int(lines["MemAvailable"].split()[0])) / 2**20


def bytes_of(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


class Commands:
    """Runs commands and keeps their times.

    Args:
        output: folder for their logs. env: of all of them. write: is called with all rows after each.
    """

    def __init__(self, output: Path, env: dict[str, str], write: Callable[[list[dict[str, Any]]], None]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._output, self._env, self._write = output, env, write

    def run(
        self,
        name: str,
        words: Sequence[Any],
        until: Callable[[], bool] | None = None,
        env: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Run a command to its end, or kill all its processes once `until` holds; return its row.

        Returns:
            name; seconds; memory_gib: the most of the host's memory in use at a time, less what was before; code: its
            exit code; killed; tail: the end of its output, if it failed.
        """
        before, most, start = memory_in_use(), 0.0, time.perf_counter()
        log = self._output / f"{name}.log"
        killed = False
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *map(str, words)], stdout=file, stderr=file, start_new_session=True,
                env=self._env | (env or {}),
            )  # fmt: skip
            while process.poll() is None:
                most = max(most, memory_in_use() - before)
                if until is not None and until():
                    os.killpg(process.pid, signal.SIGKILL)
                    killed = True
                time.sleep(0.2)
        row = {
            "name": name, "seconds": time.perf_counter() - start, "memory_gib": most, "code": process.returncode,
            "killed": killed, "command": " ".join(map(str, words)),
        }  # fmt: skip
        if process.returncode != 0 and not killed:
            row["tail"] = log.read_text(errors="replace")[-2000:]
        self.rows.append(row)
        self._write(self.rows)
        print(f"{name}: {row['seconds']:.1f} s, {most:.1f} GiB, code {process.returncode}", flush=True)
        return row


def training(options: argparse.Namespace, method: str, name: str, count: int, gpus: int) -> list[Any]:
    """Return the words of a run of so many Gaussians."""
    views = f"--pipeline.views-per-{'rank' if method == 'batch' else 'step'}"
    return [
        "nerfstudio.scripts.train", f"splatfacto-{method}", "--output-dir", options.output, "--experiment-name", name,
        "--timestamp", "run", "--machine.device-type", options.device, "--machine.num-devices", gpus,
        "--max-num-images", options.images, "--pipeline.model.max-gaussians", count, views, VIEWS_A_STEP,
        "--vis", "tensorboard", "--logging.steps-per-log", max(options.images // 2 // VIEWS_A_STEP // 16, 1),
        "--steps-per-eval-image", 0, "--steps-per-eval-all-images", 0, "--keep-checkpoints", 1,
        *options.options.split(),
    ]  # fmt: skip


def trajectory(run: Path) -> dict[str, Any]:
    """Return a run's summary and what it logged."""
    summary, metrics = run / "training_summary.json", run / "metrics.jsonl"
    found: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    kept = ("step", "images_per_s", "gaussians", "step_ms", "exchange_ms", "data_ms", "save_ms", "save_stall_ms",
            "memory_gib", "psnr", "bytes_per_step")  # fmt: skip
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return found | {"trajectory": [{key: row[key] for key in kept if key in row} for row in map(json.loads, lines)]}


def smaller(options: argparse.Namespace, commands: Commands, dataparser: list[Any]) -> dict[str, Any]:
    """Train the smaller models, each on a GPU of its own; return their trajectories by name."""
    threads = []
    for gpu, count in enumerate(options.smaller):
        name = f"smaller-{count}"
        words = [*training(options, "batch", name, count, 1), *dataparser]
        env = {"CUDA_VISIBLE_DEVICES": str(gpu % options.gpus)}
        threads.append(threading.Thread(target=commands.run, args=(name, words), kwargs={"env": env}))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [f"smaller-{count}" for count in options.smaller]
    return {name: trajectory(options.output / name / "splatfacto-batch" / "run") for name in names}


def largest(options: argparse.Namespace, commands: Commands, dataparser: list[Any], report: dict[str, Any]) -> None:
    """Take the largest model the whole way; `report` gets its trajectories and sizes."""
    run = options.output / "largest" / "splatfacto-tile" / "run"
    saves, config = run / "nerfstudio_models", run / "config.yml"
    words = training(options, "tile", "largest", options.largest, options.gpus)
    words += ["--steps-per-save", options.images // VIEWS_A_STEP // 4, "--save-in-background", "True"]

    def has_saved() -> bool:
        steps = [int(path.stem.split("-")[1]) for path in saves.glob("step-*.ckpt")]
        return max(steps, default=0) * VIEWS_A_STEP >= options.kill_from

    commands.run("largest", [*words, *dataparser], until=has_saved)
    report["largest until it was killed"] = trajectory(run)
    resume = ["nerfstudio.scripts.train", "splatfacto-tile", "--load-config", config, "--load-dir", saves]
    if commands.run("resumed", resume)["code"] != 0:
        return
    report["largest"] = trajectory(run)
    report["checkpoint_gb"] = bytes_of(run / "nerfstudio_models_state") / 1e9
    device = ["--device-type", options.device, "--num-devices", options.gpus]
    tools = "ns_multigpu.cli"
    commands.run("eval", [tools, "eval", "--load-config", config, "--output-path", run / "eval.json", *device])
    report["eval"] = json.loads((run / "eval.json").read_text()) if (run / "eval.json").exists() else {}
    frames = ["--mode", "interpolate", "--interpolation-steps", 1, "--output-path", run / "frames"]
    commands.run("render", [tools, "render", "--load-config", config, *frames, *device])
    commands.run("export", [tools, "export", "--load-config", config, "--output-path", run / "model.ply"])
    report["ply_gb"] = bytes_of(run / "model.ply") / 1e9 if (run / "model.ply").exists() else 0
    (run / "model.ply").unlink(missing_ok=True)
    more = ["--machine.num-devices", 1, "--max-num-images", options.images + 400, "--timestamp", "one"]
    commands.run("resumed on one GPU", [*resume, *more])
    report["one"] = trajectory(run.with_name("one"))


def main() -> int:
    """Run all of it; print the report's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", type=Path, required=True, help="in COLMAP's layout, sparse/0")
    parser.add_argument("--output", type=Path, required=True, help="folder for runs and logs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--largest", type=parse_count, default=60_000_000)
    parser.add_argument("--smaller", nargs="*", type=parse_count, default=[3_000_000, 15_000_000])
    parser.add_argument("--images", type=int, default=16_000)
    parser.add_argument("--kill-from", type=int, default=12_000, help="image")
    parser.add_argument("--options", default="", help="further options of ns-train, as one string")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if not (options.capture / "sparse" / "0").is_dir():
        parser.error(f"--capture {options.capture}: give a folder with images and sparse/0.")
    if options.output.is_dir() and any(options.output.iterdir()):
        parser.error(f"--output {options.output} is not empty: give a new folder.")
    if min(options.gpus, options.largest, *options.smaller, options.images // VIEWS_A_STEP // 4) < 1:
        parser.error("--gpus, --largest and --smaller: give 1 or more; --images: 8 or more.")
    options.output.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"images": options.images, "gpus_used": options.gpus}

    def write(rows: list[dict[str, Any]]) -> None:
        write_report(options.json, **report, commands=rows)

    commands = Commands(options.output, {**os.environ, "PYTHONUNBUFFERED": "1"}, write)
    dataparser = ["colmap", "--data", options.capture, "--colmap-path", "sparse/0", "--downscale-factor", 1]
    dataparser += ["--eval-mode", "interval", "--eval-interval", 40]
    report["smaller"] = smaller(options, commands, dataparser)
    largest(options, commands, dataparser, report)
    write(commands.rows)
    return max(abs(row["code"]) for row in commands.rows if not row["killed"])


if __name__ == "__main__":
    sys.exit(main())
