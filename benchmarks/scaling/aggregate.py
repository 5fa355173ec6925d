"""Operators, allocation and training steps of the aggregate device `multigpu`, compared with plain torch on one GPU.

    python -m benchmarks.scaling.aggregate --gpus 0 1 2 4 --points 8M --image 4K --json FILE
    python -m benchmarks.scaling.aggregate --gpus 0 1 2 --elements --points --limit 900 --images 15000 \\
        --train "colmap --data fox --downscale-factor 1 --eval-mode interval --eval-interval 8"

`fill`, `add`, `addmm`, `sum` and `cumsum` are those of torch-dgx's Table 1: `addmm` is of square matrices with so many
elements each. `allocate` takes and frees a tensor of so many elements with the pool, and without it (Table 4). A
training step is `ns_multigpu.render` of the procedural city, the loss |difference|, backward and fused Adam. A fused
one is that of training, by all GPUs in CUDA graphs (GPUs 0: `single`'s). GPUs 0 are torch's own device `cuda`. Each
number of GPUs has a process of its own. On a CPU: --device cpu --elements 4096 --points 500 --image 64x48. `--train`
adds a run of `splatfacto-aggregate` on a capture, or of `single` on one GPU, with ordinary steps: seconds of training
and PSNR of held-out views.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import ns_multigpu
from benchmarks.lib.report import write_report
from benchmarks.scaling.aggregate_run import fused_training
from benchmarks.scaling.tile import image_size
from benchmarks.scenes.city_model import CityScene, make_model
from ns_multigpu.core.dist.world import World
from ns_multigpu.planning.quantities import parse_count


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--gpus", nargs="+", type=int, default=[0, 1, 2], help="0: torch's own device")
    parser.add_argument("--elements", nargs="*", type=parse_count, default=[2**26, 2**28, 2**30])
    parser.add_argument("--points", nargs="*", type=parse_count, default=[8_000_000], help="of the training steps")
    parser.add_argument("--image", type=image_size, default=(3840, 2160), help="1080p, 4K, 8K or WIDTHxHEIGHT")
    parser.add_argument("--train", type=shlex.split, help="dataparser of a training run, with its options, in quotes")
    parser.add_argument("--images", type=int, default=15000, help="images that the training run sees")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a number of GPUs may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--own", type=int, help=argparse.SUPPRESS)  # of the process of one number of GPUs
    options = parser.parse_args(words)
    there = torch.cuda.device_count() if options.device == "cuda" else max(*options.gpus, 0)
    if not all(0 <= gpus <= there for gpus in options.gpus):
        parser.error(f"--gpus {' '.join(map(str, options.gpus))}: give numbers from 0 to {there}.")
    return options


class Timed:
    """Timer of calls on one device; `ms` waits for the device before and after the calls."""

    def __init__(self, options: argparse.Namespace, gpus: int) -> None:
        self.device = options.device
        self.wait: Callable[[], None] = lambda: None
        self.empty_cache: Callable[[], None] = lambda: None
        if gpus == 0:
            if options.device == "cuda":
                self.wait, self.empty_cache = torch.cuda.synchronize, torch.cuda.empty_cache
            return
        from ns_multigpu import aggregate  # registers the device, for this process alone

        on_host = options.device == "cpu"
        aggregate.use(None if on_host else list(range(gpus)), host_members=gpus if on_host else 0)
        self.device, self.wait, self.empty_cache = "multigpu", aggregate.synchronize, aggregate.empty_cache

    def ms(self, call: Callable[[], Any], repeats: int = 20) -> float:
        """Return milliseconds a call: of `repeats`, after a quarter as many."""
        for _ in range(max(repeats // 4, 1)):
            call()
        self.wait()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        self.wait()
        return 1e3 * (time.perf_counter() - began) / repeats


def operators(timed: Timed, elements: int) -> dict[str, float]:
    """Return milliseconds of each operator."""
    one, other = (torch.rand(elements, device=timed.device) for _ in range(2))
    out, side = torch.empty_like(one), int(elements**0.5)
    square = [values[: side * side].view(side, side) for values in (one, other, out)]
    calls: dict[str, Callable[[], Any]] = {
        "fill": lambda: out.fill_(2.0),
        "add": lambda: torch.add(one, other, out=out),
        "addmm": lambda: torch.addmm(square[0], square[0], square[1], out=square[2]),
        "sum": lambda: one.sum(),
        "cumsum": lambda: torch.cumsum(one, 0, out=out),
    }
    return {name: timed.ms(call, 4 if name == "addmm" else 20) for name, call in calls.items()}


def allocation(timed: Timed, elements: int) -> dict[str, float]:
    """Return milliseconds of taking and freeing a tensor, from the pool and from the driver."""

    def afresh() -> None:
        torch.empty(elements, device=timed.device)
        timed.empty_cache()

    return {"pool": timed.ms(lambda: torch.empty(elements, device=timed.device)), "driver": timed.ms(afresh, 4)}


def training(timed: Timed, points: int, options: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds of a step, a view each, and the loss before the first and after the last."""
    width, height = options.image
    scene = CityScene(points, width, height, views=4)
    where = torch.device("cpu" if options.device == "cpu" else "cuda")
    world = World.single(where)
    model = make_model(scene, world)
    params = {name: value.detach().to(timed.device).requires_grad_() for name, value in model.params.items()}
    del model
    views = scene.cameras()
    viewmats = torch.stack([view.viewmat for view in views]).float().to(timed.device)
    Ks = torch.stack([view.K for view in views]).float().to(timed.device)
    torch.manual_seed(0)
    target = torch.rand(1, height, width, 3, device=where).to(timed.device)
    optimizer = torch.optim.Adam(list(params.values()), lr=1e-3, fused=True)
    losses, number = [], [0]

    def step() -> None:
        view = number[0] % len(views)
        number[0] += 1
        colors = torch.cat([params["features_dc"][:, None], params["features_rest"]], 1)
        images, _, _ = ns_multigpu.render(
            params["means"], params["quats"], params["scales"].exp(), params["opacities"][:, 0].sigmoid(), colors,
            viewmats[view, None], Ks[view, None], width, height, sh_degree=3,
        )  # fmt: skip
        loss = (images - target).abs().mean()
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    ms = timed.ms(step, 8)
    return {"ms": ms, "first": losses[0].item(), "last": losses[-1].item()}


def training_run(options: argparse.Namespace) -> dict[str, float]:
    """Return seconds of training, PSNR of held-out views and the number of Gaussians of a run of `ns-train`.

    Raises:
        RuntimeError, subprocess.TimeoutExpired: it failed, or took longer than the limit.
    """
    method = ["splatfacto-aggregate", "--machine.num-devices", str(options.own)]
    if options.own == 0:
        method = ["splatfacto-batch", "--pipeline.strategy", "single", "--fused-steps", "never"]
    with TemporaryDirectory() as folder:
        words = [*method, "--machine.device-type", options.device, "--output-dir", folder, "--vis", "tensorboard"]
        words += ["--max-num-images", str(options.images), "--viewer.quit-on-train-completion", "True"]
        words += ["--steps-per-eval-image", "0", "--steps-per-eval-all-images", "0", *options.train]
        command = [sys.executable, "-m", "nerfstudio.scripts.train", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=0.9 * options.limit)
        if done.returncode:
            raise RuntimeError(done.stdout[-300:] + done.stderr[-300:])
        summary = json.loads(next(Path(folder).rglob("training_summary.json")).read_text())
    return {"seconds": summary["train_seconds"], "PSNR": summary["psnr"], "Gaussians": float(summary["gaussians"])}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one number of GPUs, or the error of those that have none."""
    timed, found = Timed(options, options.own), dict[str, Any]()
    parts: dict[str, Callable[[], dict[str, float]]] = {}
    for elements in options.elements:
        parts[f"{elements} elements"] = lambda n=elements: operators(timed, n)
        parts[f"allocate {elements} elements"] = lambda n=elements: allocation(timed, n)
    of_steps = (*options.image, options.own, options.device, timed.wait)
    for points in options.points:
        parts[f"training, {points} Gaussians"] = lambda n=points: training(timed, n, options)
        parts[f"fused training, {points} Gaussians"] = lambda n=points: fused_training(n, *of_steps)
    if options.train:
        parts[f"training run, {options.images} images"] = lambda: training_run(options)
    for name, part in parts.items():
        try:
            found[name] = part()
        except (RuntimeError, NotImplementedError, subprocess.TimeoutExpired) as error:
            found[name] = {"error": str(error)[:600]}
        print(json.dumps({name: found[name]}), flush=True)
    return found


def main() -> int:
    options = arguments()
    if options.own is not None:
        measure(options)
        return 0
    rows = list[dict[str, Any]]()
    for gpus in options.gpus:
        command = [sys.executable, "-m", "benchmarks.scaling.aggregate", *sys.argv[1:], "--own", str(gpus)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=options.limit)
            out, problem = done.stdout, done.stderr[-1500:] if done.returncode else ""
        except subprocess.TimeoutExpired as late:
            out, problem = (late.stdout or b"").decode(), f"stopped after {options.limit:.0f} s"
        parts: dict[str, Any] = {}
        for line in out.splitlines():
            if line.startswith("{"):
                parts |= json.loads(line)
        failed = [problem, *(f"{name}: {part['error']}" for name, part in parts.items() if "error" in part)]
        row = {"gpus": gpus, "way": f"{gpus} GPUs" if gpus else "torch", "parts": parts}
        problems = [text for text in failed if text]
        rows.append(row | ({"error": "; ".join(problems)} if problems else {}))
        write_report(options.json, benchmark="aggregate", rows=rows)
    shown = Table("ms", *(row["way"] for row in rows))
    lines = dict.fromkeys((part, call) for row in rows for part, calls in row["parts"].items() for call in calls)
    for part, call in lines:
        values = [row["parts"].get(part, {}).get(call, "") for row in rows]
        shown.add_row(f"{part}: {call}", *(f"{v:.4g}" if isinstance(v, float) else str(v)[-300:] for v in values))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(shown)
    for row in rows:
        if "error" in row:
            console.print(f"{row['way']}: {row['error']}", markup=False, highlight=False)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
