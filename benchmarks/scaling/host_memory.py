"""Measure the host memory of a capture's images, over all ranks of a machine.

    python -m benchmarks.scaling.host_memory [--views 2000 --width 1920 --height 1080 --ranks 4] \\
        [--device cuda] [--json FILE]

Every rank makes its share as training does, and reports the memory of its process before and after. `--content city`
renders the views of the procedural city through the datamanager; `noise` fills them with random numbers through
`ImageShare`, which takes the same memory and less time. With --image-memory-gb each rank keeps that much and decodes
the rest on demand, over `--steps` steps of one view a rank. `--step-ms` is the time of a step's computation.
"""

import argparse
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.lib.report import empty_table, write_report
from ns_multigpu.core.assign.assignment import RoundRobinViews
from ns_multigpu.core.assign.view_sequence import ViewSequence
from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.plugin.capture.city_dataparser import CityDataParserConfig
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager, DistributedDataManagerConfig
from ns_multigpu.plugin.capture.image_share import ImageShare
from ns_multigpu.plugin.capture.image_store import ImageData, ImageShape
from ns_multigpu.plugin.faults.host_memory import own_memory
from ns_multigpu.plugin.launch.process_world import set_world
from tests.lib.ranks import run_ranks

ALLOWED = 1.2
"""Times one uint8 copy of the capture that all ranks together may take."""


@dataclass(frozen=True)
class Task:
    """Options of the measurement."""

    views: int
    width: int
    height: int
    content: str
    image_memory_gb: float | None
    steps: int
    step_ms: float


@dataclass(frozen=True)
class Measured:
    """Of one rank: bytes of its process before, after and at most, and what its share says of itself."""

    uss_before: int
    pss_before: int
    uss_after: int
    pss_after: int
    peak: int
    held: int
    images: int
    seconds: float
    decoded: int
    waited: float
    step_seconds: float


def measure(world: World, task: Task) -> Measured:
    """One rank's part."""
    if world.device.type == "cuda":
        torch.zeros(1, device=world.device)  # the CUDA context is not the images'
    make, sequence = _maker(world, task)
    barrier(world)
    before = own_memory()
    peak = _Peak()
    began = time.perf_counter()
    share = make()
    seconds = time.perf_counter() - began
    decoded = share.store.decoded
    step_seconds = _train(share, sequence, world, task) if not share.store.complete else 0.0
    highest = peak.stop()
    barrier(world)
    after = own_memory()
    return Measured(
        *before, *after, highest, share.store.nbytes, len(share.own), seconds,
        share.store.decoded - decoded, share.store.waited, step_seconds,
    )  # fmt: skip


def _maker(world: World, task: Task) -> tuple[Any, ViewSequence]:
    if task.content == "city":
        set_world(world)
        parser = CityDataParserConfig(
            blocks=4, views=task.views, width=task.width, height=task.height, eval_interval=0, points=1000
        )
        config = DistributedDataManagerConfig(dataparser=parser, image_memory_gb=task.image_memory_gb)  # type: ignore
        data = DistributedDataManager(config, device=world.device, test_mode="test")
        return lambda: data.train_share, data.sequence
    shape = ImageShape(task.height, task.width, 3, torch.uint8, 0)

    def decode(index: int) -> ImageData:
        rng = np.random.Generator(np.random.SFC64(index))
        data = rng.bytes(shape.nbytes)
        return {"image": torch.from_numpy(np.frombuffer(data, np.uint8).reshape(task.height, task.width, 3).copy())}

    budget = None if task.image_memory_gb is None else int(task.image_memory_gb * 1e9)
    pinned = world.device.type == "cuda"
    return (
        lambda: ImageShare([shape] * task.views, decode, world, label="random", budget=budget, pinned=pinned),
        ViewSequence(task.views, seed=0),
    )


def _train(share: ImageShare, sequence: ViewSequence, world: World, task: Task) -> float:
    """Seconds of a step of one view a rank that computes for `step_ms`."""
    size = world.size
    barrier(world)
    began = time.perf_counter()
    for step in range(task.steps):
        batch = sequence.batch(step, size)
        share.expect([sequence.at(p) for p in range(step * size, (step + 1) * size + share.lookahead)])
        views = [View(torch.eye(4), torch.eye(3), task.width, task.height) for _ in batch]
        plan = RoundRobinViews().assign(views, size, [share.holder(i) for i in batch])
        share.deliver(batch, plan, world.device, views)
        time.sleep(task.step_ms / 1e3)
    barrier(world)
    return (time.perf_counter() - began) / max(task.steps, 1)


class _Peak:
    """The most that this process has held (PSS) since, looked at ten times a second."""

    def __init__(self) -> None:
        self._most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(0.1):
            self._most = max(self._most, own_memory()[1])

    def stop(self) -> int:
        """Ends looking; returns bytes."""
        self._end.set()
        self._thread.join()
        return max(self._most, own_memory()[1])


def summary(task: Task, ranks: list[Measured]) -> dict[str, float]:
    """All ranks together, in GB and in copies of the capture."""
    copy = task.views * task.width * task.height * 3
    pss = sum(r.pss_after - r.pss_before for r in ranks)
    uss = sum(r.uss_after - r.uss_before for r in ranks)
    peak = sum(r.peak - r.pss_before for r in ranks)
    return {
        "copy_gb": copy / 1e9, "pss_gb": pss / 1e9, "uss_gb": uss / 1e9, "peak_gb": peak / 1e9,
        "pss_copies": pss / copy, "uss_copies": uss / copy, "peak_copies": peak / copy,
        "processes_gb": sum(r.pss_before for r in ranks) / 1e9, "seconds": max(r.seconds for r in ranks),
    }  # fmt: skip


def show(task: Task, ranks: list[Measured], device: str) -> dict[str, float]:
    """Prints a table; returns the summary."""
    total = summary(task, ranks)
    title = f"{task.views} views of {task.width}x{task.height} ({task.content}) on {len(ranks)} {device}"
    heads = ("rank", "images", "share, GB", "PSS before", "PSS after", "at most", "decoded", "waited, s")
    table = empty_table(title, heads)
    for rank, r in enumerate(ranks):
        numbers = [r.held, r.pss_before, r.pss_after, r.peak]
        cells = [f"{n / 1e9:.2f}" for n in numbers]
        table.add_row(str(rank), str(r.images), *cells, str(r.decoded), f"{r.waited:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"One uint8 copy is {total['copy_gb']:.2f} GB. The ranks took {total['pss_gb']:.2f} GB for it (PSS; USS "
        f"{total['uss_gb']:.2f}), that is {total['pss_copies']:.3f} copies, and {total['peak_copies']:.3f} at most, in "
        f"{total['seconds']:.1f} s; the processes themselves hold {total['processes_gb']:.2f} GB."
    )
    if task.image_memory_gb is not None and ranks[0].step_seconds:
        step = max(r.step_seconds for r in ranks)
        console.print(
            f"On demand: {task.steps} steps of {task.step_ms:g} ms took {1e3 * step:.1f} ms each, of which ranks "
            f"waited {1e3 * sum(r.waited for r in ranks) / len(ranks) / task.steps:.1f} ms for images."
        )
    return total


def main() -> None:
    """Measures, prints, and says whether the memory stays within what is allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--views", type=int, default=2000)
    parser.add_argument("--width", type=int, default=1920)
    parser.add_argument("--height", type=int, default=1080)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--content", choices=["noise", "city"], default="noise")
    parser.add_argument("--image-memory-gb", type=float, default=None, help="what a rank may keep")
    parser.add_argument("--steps", type=int, default=100, help="with --image-memory-gb: steps to go through")
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a step computes, milliseconds")
    parser.add_argument("--json", type=Path, default=None, help="writes the figures there as well")
    a = parser.parse_args()
    task = Task(a.views, a.width, a.height, a.content, a.image_memory_gb, a.steps, a.step_ms)
    # Not forked: shared memory of forked processes belongs to no single one.
    ranks: list[Measured] = run_ranks(measure, a.ranks, task, device=a.device, seconds=3600, fork=False)
    total = show(task, ranks, a.device)
    write_report(a.json, task=asdict(task), total=total, ranks=[asdict(r) for r in ranks])
    if a.image_memory_gb is None and total["pss_copies"] > ALLOWED:
        raise SystemExit(f"{total['pss_copies']:.2f} copies are more than the {ALLOWED} allowed")


if __name__ == "__main__":
    main()
