"""Progress log of a run, and its summary at the end."""

import gc
import json
import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nerfstudio.utils import writer
from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text

from ns_multigpu.core.dist.collectives import all_gather_floats
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks.timing import StepTimer
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.run.late_images import write_images_late
from ns_multigpu.plugin.run.objective import LogEntry
from ns_multigpu.plugin.run.terminal import PsnrWatch

_PARTS = ("data", "compute", "exchange")

_PATIENCE = 1000
"""Steps for which training's PSNR must be far below its best before a warning."""

_FEWEST_LOGS = 20
"""Minimum number of logs for which it must be below: a few views say little."""


@dataclass(frozen=True)
class _Since:
    """Progress since the last log.

    Attributes:
        step: the current step. steps: steps since the last log, of `batch` images each.
        elapsed: seconds. sent: bytes sent per step.
    """

    step: int
    steps: int
    batch: float
    elapsed: float
    sent: float


class ProgressLog:
    """Writer of `metrics.jsonl` (one line per log) and `training_summary.json` in the run folder.

    Times are in milliseconds per step: `data` (choosing views, loading images), `compute` (render, loss, backward,
    update), `exchange` (what the exchange adds after backward) and `waiting` (for the slowest rank).

    Args:
        world: the ranks.
        folder: the run's.
        period: steps between logs.

    Attributes:
        start_metrics: held-out metrics before the first step, if requested.
        psnr: monitor of training's PSNR.
        seconds: duration of training alone, once it is over.
    """

    def __init__(self, world: World, folder: Path, period: int = 10) -> None:
        self._world = world
        self._folder = folder
        self._began = self._last_time = time.perf_counter()
        self._last_step = -1
        self._not_training = 0.0
        self._pause_since_log = 0.0
        self._bytes_before = world.traffic.sent
        self._bytes_evaluating = 0
        world.traffic.since("log")
        world.traffic.between_since("log")
        self.start_metrics: dict[str, float] = {}
        self.psnr = PsnrWatch(max(_PATIENCE // max(period, 1), _FEWEST_LOGS))
        self.seconds = 0.0
        self._disk_reported = False
        self._images = write_images_late()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the enclosed time and traffic (evaluation, checkpoints) from training's."""
        start, sent = time.perf_counter(), self._world.traffic.sent
        with self._world.traffic.apart("log"):
            yield
        elapsed = time.perf_counter() - start
        self._not_training += elapsed
        self._pause_since_log += elapsed
        self._bytes_evaluating += self._world.traffic.sent - sent

    def restart_clock(self, first_step: int = 0) -> None:
        """Start the clock of training, which begins with `first_step`."""
        gc.freeze()  # imported and set-up objects stay alive: exclude them from garbage collection
        run_parts().done("before the first step")
        self._last_step = first_step - 1
        self._began = self._last_time = time.perf_counter()

    def log(self, step: int, timer: StepTimer, entry: LogEntry, further: Mapping[str, float]) -> Callable[[], None]:
        """Record this rank's measurements. Every rank calls it at the same steps.

        Args:
            timer: this rank's time by part since the last log.
            entry: the step's log entry.
            further: further values of the row, such as the time of saves.

        Returns:
            a function that sums them over the ranks and writes them. Every rank calls it once; later steps may be
            running.
        """
        loss, losses, metrics = entry.measured
        shares = {"loss": loss, **losses, **metrics}
        values = torch.stack([share.detach().float().reshape(()) for share in shares.values()]).tolist()
        crossed = float(self._world.traffic.between_since("log"))
        since, seconds = self._since(step, entry.images), timer.cut()
        own, count, peak = list(entry.by_rank.values()), len(values) + len(entry.by_rank), peak_memory(self._world)

        def finish() -> None:
            taken = seconds()
            # Gather everything in one collective over the host: each would be waited for.
            parts = (taken.get(part, 0.0) for part in _PARTS)
            table = all_gather_floats([*values, *own, *parts, crossed, peak], self._world)
            summed = summed_up(list(shares), [row[: len(values)] for row in table])
            columns = zip(*(row[len(values) : count] for row in table), strict=True)
            by_rank = {name: list(column) for name, column in zip(entry.by_rank, columns, strict=False)}
            more = {**entry.row, **entry.derived(by_rank), **further, "memory_gib": max(row[-1] for row in table)}
            if self._world.machines > 1:
                more["bytes_between_machines"] = sum(row[-2] for row in table) / since.steps
            row = self._row(since, [row[count:-2] for row in table], summed, more)
            if "psnr" in summed and (warning := self.psnr.look(summed["psnr"], step)) and self._world.is_main:
                CONSOLE.print(Text(warning, "bold yellow"), soft_wrap=True)
            metrics = {"psnr": summed["psnr"], **entry.metrics}
            write_step(step, summed, list(losses), metrics, row, entry.rates, self._world)

        return finish

    def _since(self, step: int, batch: float) -> "_Since":
        """Return the progress since the last log, and restart the interval here."""
        now, steps = time.perf_counter(), max(step - self._last_step, 1)
        elapsed = max(now - self._last_time - self._pause_since_log, 1e-9)
        self._last_step, self._last_time, self._pause_since_log = step, now, 0.0
        return _Since(step, steps, batch, elapsed, self._world.traffic.since("log") / steps)

    def _row(
        self,
        since: "_Since",
        seconds: Sequence[Sequence[float]],
        values: Mapping[str, float],
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the means over ranks since the last row, and write them to metrics.jsonl.

        Args:
            seconds: of each rank, its time for data, compute and exchange since the last row.
            values: losses and metrics of this step, already summed over ranks.
            more: further values of the row.
        """
        busy, steps = [data + compute for data, compute, _ in seconds], since.steps
        data, compute, exchange = (sum(column) / len(seconds) for column in zip(*seconds, strict=True))
        # A fast rank spends its lead over the slowest inside the exchange.
        waiting = sum(min(max(busy) - b, row[2]) for b, row in zip(busy, seconds, strict=True)) / len(seconds)
        result = {
            "data_ms": 1e3 * data / steps,
            "compute_ms": 1e3 * compute / steps,
            "exchange_ms": 1e3 * (exchange - waiting) / steps,
            "waiting_ms": 1e3 * waiting / steps,
            "step_ms": 1e3 * since.elapsed / steps,
            "images_per_s": steps * since.batch / since.elapsed,
            "bytes_per_step": since.sent,
            **more,
        }
        if self._world.is_main:
            numbers = {k: v if isinstance(v, list) else round(v, 6) for k, v in {**values, **result}.items()}
            line = {"step": since.step, **numbers}
            self._write("metrics.jsonl", "a", json.dumps(line) + "\n")
        return result

    def _write(self, name: str, mode: str, text: str) -> None:
        """Write a file in the run's folder. A failing disk produces one message and does not end the run."""
        try:
            with (self._folder / name).open(mode, encoding="utf8") as file:
                file.write(text)
        except OSError as error:
            if not self._disk_reported:
                self._disk_reported = True
                CONSOLE.print(
                    Text(f"{self._folder / name} cannot be written: {error}. Training goes on.", "bold yellow")
                )

    def trained(self) -> None:
        """Stop the clock of training."""
        self.seconds = max(time.perf_counter() - self._began - self._not_training, 1e-9)
        run_parts().done("training")

    def finish(self, steps: int, batch: float, size: Mapping[str, int], more: Mapping[str, Any] | None = None) -> None:
        """Write the run's summary, on rank 0: seconds of training alone, bytes sent per rank.

        Args:
            steps: completed steps. batch: images of each. size: size of the model.
            more: further entries.
        """
        run_parts().done("last look at held-out views")
        for images in self._images:
            images.finish()
        run_parts().done("last images for TensorBoard")
        seconds = self.seconds
        sent = self._world.traffic.sent - self._bytes_before - self._bytes_evaluating
        summary: dict[str, Any] = {
            "ranks": self._world.size,
            "device": self._world.device.type,
            "steps": steps,
            "images": steps * batch,
            "train_seconds": seconds,
            "steps_per_s": steps / seconds,
            "images_per_s": steps * batch / seconds,
            "bytes_per_step": sent / max(steps, 1),
            **size,
            "psnr_start": self.start_metrics.get("psnr"),
            "ssim_start": self.start_metrics.get("ssim"),
            **(more or {}),
            "startup_ms": run_parts().as_dict(),
        }
        file = self._folder / "training_summary.json"
        # A restart without steps left to run must not replace the earlier summary.
        if self._world.is_main and (steps > 0 or not file.exists()):
            self._write(file.name, "w", json.dumps(summary, indent=2) + "\n")
            run_parts().add_exit(file, "run summary and exit")


def peak_memory(world: World) -> float:
    """Return the most memory that this rank has held, GiB: of its GPU, or of its process if it computes on the CPU."""
    if world.device.type != "cpu":
        return torch.get_device_module(world.device).max_memory_allocated(world.device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def summed_up(names: Sequence[str], shares: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the sums of shares over ranks, by name; `mse` becomes `psnr`."""
    summed = {name: float(sum(column)) for name, column in zip(names, zip(*shares, strict=True), strict=True)}
    if "mse" in summed:
        summed["psnr"] = -10 * math.log10(max(summed.pop("mse"), 1e-12))
    return summed


def write_step(
    step: int,
    summed: Mapping[str, float],
    losses: Sequence[str],
    metrics: Mapping[str, Any],
    row: Mapping[str, Any],
    rates: Mapping[str, float],
    world: World,
) -> None:
    """Pass a step's numbers to nerfstudio's writers, under its names.

    Args:
        summed: the loss and its terms, by name.
        losses: the names of the terms.
        metrics: nerfstudio's metrics.
        row: the result of `ProgressLog._row`.
        rates: learning rates by parameter group.
    """
    writer.put_scalar(name="Train Loss", scalar=summed["loss"], step=step)
    writer.put_dict(name="Train Loss Dict", scalar_dict={name: summed[name] for name in losses}, step=step)
    writer.put_dict(name="Train Metrics Dict", scalar_dict=dict(metrics), step=step)
    writer.put_dict(name="Step", scalar_dict={k: v for k, v in row.items() if not isinstance(v, list)}, step=step)
    for name, rate in rates.items():
        writer.put_scalar(name=f"learning_rate/{name}", scalar=rate, step=step)
    if world.device.type == "cuda":
        writer.put_scalar(name="GPU Memory (MB)", scalar=torch.cuda.max_memory_allocated() / 2**20, step=step)
