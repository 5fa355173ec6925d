"""Trains a small procedural city with several workers, evaluates it, renders a video of it and prints what came out.

Everything goes through nerfstudio's own commands, as a user would type them. `make demo` runs this.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo import camera_path
from demo.command import CommandFailed, Stages

WIDTH, HEIGHT = 480, 360
"""Of the views and of the video, pixels."""
ALTITUDE = 95.0
"""Altitude of the capture's and the video's cameras, metres."""
BLOCK = 70.0
"""A block of the city and its road, metres."""
FOV = 52.0
"""Horizontal field of view of the video, degrees; the capture's."""
VIDEO_FRAMES, VIDEO_FPS = 96, 24


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="worker processes; with GPUs, at most one for each")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda if there is a GPU, else cpu")
    parser.add_argument("--blocks", type=int, default=1, help="blocks of the city along each side")
    parser.add_argument("--views", type=int, default=72, help="views of the capture")
    parser.add_argument("--steps", type=int, default=600, help="training steps, of one view a worker each")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for all results")
    return parser.parse_args()


def nerfstudio(script: str, *words: str | Path) -> list[str]:
    """Return the command line of `ns-SCRIPT WORDS`, with this very Python."""
    return [sys.executable, "-W", "ignore", "-m", f"nerfstudio.scripts.{script}", *map(str, words)]


def train_command(options: argparse.Namespace, device: str, workers: int) -> list[str]:
    steps = options.steps
    return nerfstudio(
        "train",
        "splatfacto-batch",
        *("--machine.device-type", device, "--machine.num-devices", str(workers)),
        *("--output-dir", options.output / "runs", "--experiment-name", "city", "--timestamp", "demo"),
        *("--max-num-iterations", str(steps), "--steps-per-save", str(steps), "--eval-at-start", "True"),
        *("--steps-per-eval-image", "0", "--steps-per-eval-batch", "0", "--steps-per-eval-all-images", "0"),
        *("--recipe", "splatfacto", "--pipeline.model.num-downscales", "1"),
        *("--pipeline.model.resolution-schedule", "400"),
        *("--vis", "tensorboard", "--logging.local-writer.max-log-size", "0"),
        "city",
        *("--blocks", str(options.blocks), "--capture", "aerial", "--views", str(options.views)),
        *("--width", str(WIDTH), "--height", str(HEIGHT), "--altitude", str(ALTITUDE)),
    )


def training_watch(run: Path, steps: int) -> Any:
    """Return a `Watch` on the lines that the trainer adds to metrics.jsonl."""

    def watch() -> tuple[float, str] | None:
        try:
            last = json.loads((run / "metrics.jsonl").read_text("utf8").splitlines()[-1])
        except (OSError, ValueError, IndexError):
            return None  # no line yet, or half of one
        note = f"step {last['step']}  {last.get('psnr', float('nan')):.1f} dB  {last['images_per_s']:.1f} images/s"
        return (last["step"] + 1) / steps, note

    return watch


def table(summary: dict[str, Any], places: dict[str, Path]) -> Table:
    """Return the results as text for the terminal."""
    result = Table(title=f"{summary['workers']} workers on {summary['device']}", title_justify="left")
    result.add_column("")
    result.add_column("before", justify="right")
    result.add_column("after", justify="right", overflow="fold")
    result.add_row("PSNR, held-out views (dB)", f"{summary['psnr_start']:.2f}", f"{summary['psnr']:.2f}")
    result.add_row("SSIM, held-out views", f"{summary['ssim_start']:.3f}", f"{summary['ssim']:.3f}")
    result.add_section()
    result.add_row("training time (s)", "", f"{summary['train_seconds']:.0f}")
    result.add_row("steps a second", "", f"{summary['steps_per_s']:.2f}")
    result.add_row("images a second", "", f"{summary['images_per_s']:.2f}")
    result.add_row("bytes a worker sends in a step", "", f"{summary['bytes_per_step']:,.0f}")
    result.add_row("Gaussians", "", f"{summary['gaussians']:,}")
    result.add_section()
    for name, place in places.items():
        result.add_row(name, "", str(place))
    return result


def demo(options: argparse.Namespace, stages: Stages) -> tuple[dict[str, Any], dict[str, Path]]:
    """Run all stages. Return the summary and the path of each output."""
    output = options.output
    gpus = torch.cuda.device_count()
    device = options.device or ("cuda" if gpus else "cpu")
    workers = min(options.workers, gpus) if device == "cuda" and gpus else options.workers
    run = output / "runs" / "city" / "splatfacto-batch" / "demo"
    places = {
        "run (config, checkpoint, logs)": run,
        "held-out views": output / "held-out",
        "video": output / "flight.mp4",
        "these figures": output / "summary.json",
        "logs": output / "logs",
    }
    config = str(run / "config.yml")
    if device == "cpu":
        stages.run("build", "Native operators", [sys.executable, "-m", "cuda_ext"])
    command = train_command(options, device, workers)
    stages.say(f"[dim]ns-train {shlex.join(command[5:])}[/dim]")
    stages.run("train", "Training", command, training_watch(run, options.steps))
    evaluate = nerfstudio(
        "eval",
        "--load-config",
        config,
        "--output-path",
        output / "eval.json",
        "--render-output-path",
        output / "held-out",
    )
    stages.run("eval", "Held-out views", evaluate)
    path = output / "flight.json"
    camera_path.write(
        path,
        run / "dataparser_transforms.json",
        options.blocks * BLOCK / 2,
        ALTITUDE,
        (WIDTH, HEIGHT),
        FOV,
        VIDEO_FRAMES,
        VIDEO_FPS,
    )
    where = ("--load-config", config, "--camera-path-filename", path, "--output-path", places["video"])
    stages.run("render", "Video", nerfstudio("render", "camera-path", *where))
    trained = json.loads((run / "training_summary.json").read_text("utf8"))
    scores = json.loads((output / "eval.json").read_text("utf8"))["results"]
    copied = ("psnr_start", "ssim_start", "steps_per_s", "images_per_s", "bytes_per_step", "train_seconds", "steps")
    summary = {
        "psnr": scores["psnr"],
        "ssim": scores["ssim"],
        **{name: trained[name] for name in copied},
        "gaussians": trained["gaussians"],
        "workers": workers,
        "device": device,
        "video": str(places["video"]),
    }
    return summary, places


def main() -> int:
    """Run the demo and return the exit status."""
    options = arguments()
    console = Console()
    start = time.monotonic()
    shutil.rmtree(options.output / "runs" / "city", ignore_errors=True)
    try:
        import imageio_ffmpeg

        with tempfile.TemporaryDirectory() as folder:
            # nerfstudio needs the program ffmpeg, which few machines have; the package contains one.
            os.symlink(imageio_ffmpeg.get_ffmpeg_exe(), Path(folder) / "ffmpeg")
            environment = {"PATH": os.environ.get("PATH", "") + os.pathsep + folder}
            with Stages(options.output / "logs", environment) as stages:
                summary, places = demo(options, stages)
    except CommandFailed as error:
        console.print(Panel(Text(str(error)), title="The demo stopped", border_style="red"))
        return 1
    except KeyboardInterrupt:
        return 130
    summary["total_seconds"] = time.monotonic() - start
    (options.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", "utf8")
    console.print(table(summary, places))
    console.print(f"All of it took {summary['total_seconds']:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
