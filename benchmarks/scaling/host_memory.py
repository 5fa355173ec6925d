"""Measure the host memory of a capture's images, or of a checkpoint, over all ranks of a machine.

    python -m benchmarks.scaling.host_memory [--views 2000 --ranks 4] [--device cuda] [--json FILE]
    python -m benchmarks.scaling.host_memory --checkpoint 4M --ranks 2 [--json FILE]

Every rank makes its share of images of random numbers as training does, and reports the memory of its process before
and after. With --checkpoint a run of `splatfacto-tile` with so many Gaussians takes a step, saves, saves in the
background, and is resumed by other processes. Of a save what it takes besides training counts; of resuming what the
processes take in all besides their start: on a CPU the model and Adam's state, too.
"""

import argparse
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console

from benchmarks.lib.report import empty_table, write_report
from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import World
from ns_multigpu.planning.quantities import parse_count
from ns_multigpu.plugin.capture.image_share import ImageShare
from ns_multigpu.plugin.capture.image_store import ImageData, ImageShape
from tests.lib.ranks import run_ranks
from tests.lib.training_run import save_nothing, set_up, small_config, write_capture

ALLOWED = 1.1
"""Times one uint8 copy of the capture that all ranks together may take."""
ALLOWED_OF_CHECKPOINT = 1.3
"""Times a checkpoint's bytes that all ranks together may take for it."""
_FEW = 1000
"""Gaussians that a run begins with which resumes."""
SHAPE = ImageShape(1080, 1920, 3, torch.uint8, 0)


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


def measure(world: World, views: int) -> Measured:
    """Measure one rank's part."""
    if world.device.type == "cuda":
        torch.zeros(1, device=world.device)  # the CUDA context is not the images'
    barrier(world)
    before = _memory()
    peak = _Peak()
    began = time.perf_counter()
    share = ImageShare([SHAPE] * views, _decode, world, label="random", pinned=world.device.type == "cuda")
    seconds = time.perf_counter() - began
    highest = peak.stop()
    barrier(world)
    return Measured(*before, *_memory(), highest, share.store.nbytes, len(share.own), seconds)


def _memory() -> tuple[int, int]:
    """Return this process's private bytes (USS), and those with its part of shared ones (PSS)."""
    info = psutil.Process().memory_full_info()
    return info.uss, info.pss


def _decode(index: int) -> ImageData:
    data = np.random.Generator(np.random.SFC64(index)).bytes(SHAPE.nbytes)
    return {"image": torch.from_numpy(np.frombuffer(data, np.uint8).reshape(SHAPE.height, SHAPE.width, 3).copy())}


def save_twice(world: World, folder: Path, points: int) -> dict[str, float]:
    """Return the most bytes that this rank takes besides training, for a save and one in the background."""
    config = _run(folder, points)
    trainer = set_up(world, config)
    save_nothing(trainer)
    trainer.train()
    found: dict[str, float] = {}
    for step, name in enumerate(("a save", "a save in the background")):
        barrier(world)
        before, peak = _memory()[1], _Peak()
        trainer.checkpoints.save(step, background=step == 1)
        trainer.checkpoints.writer.finish()
        found[name] = peak.stop() - before
    return found


def resume(world: World, folder: Path, points: int) -> dict[str, float]:
    """Return the most bytes that this rank takes for a run that resumes, and those that it holds at the end."""
    config = _run(folder, _FEW)  # a run that grew begins with fewer
    config.load_dir = config.get_checkpoint_dir()
    before, peak = _memory()[1], _Peak()
    trainer = set_up(world, config)
    assert trainer.pipeline.model.total_points == points
    return {"resuming": peak.stop() - before, "held when it has resumed": _memory()[1] - before}


def _run(folder: Path, points: int) -> Any:
    config = small_config(folder / "capture", folder / "runs", "splatfacto-tile")
    config.max_num_iterations, config.max_num_images = 3, None
    model = config.pipeline.model
    model.random_init, model.num_random, model.num_downscales = True, points, 0
    return config


def checkpoint(points: int, ranks: int, console: Console, json: Path | None) -> None:
    """Measure a checkpoint's memory, print it, and compare it with what is allowed."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="host-memory-") as name:
        folder = Path(name)
        write_capture(folder / "capture", wide=False)
        for job in (save_twice, resume):
            of_ranks = run_ranks(job, ranks, folder, points, seconds=3600, fork=False)
            found |= {what: sum(rank[what] for rank in of_ranks) for what in of_ranks[0]}
        newest = max(folder.glob("runs/**/step-*-*"), key=lambda path: path.name)
        size = sum(file.stat().st_size for file in newest.iterdir())
    heads = ("host memory, all workers", "GB", "checkpoints")
    table = empty_table(f"{points:,} Gaussians on {ranks} CPU workers", heads)
    for what, taken in found.items():
        table.add_row(what, f"{taken / 1e9:.2f}", f"{taken / size:.3f}")
    console.print(table)
    copies = {what: taken / size for what, taken in found.items()}
    write_report(json, points=points, checkpoint_gb=size / 1e9, ranks=ranks, copies=copies)
    if max(copies.values()) > ALLOWED_OF_CHECKPOINT:
        raise SystemExit(f"more than the {ALLOWED_OF_CHECKPOINT} checkpoints allowed")


class _Peak:
    """The most that this process has held (PSS) since, looked at ten times a second."""

    def __init__(self) -> None:
        self._most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(0.1):
            self._most = max(self._most, _memory()[1])

    def stop(self) -> int:
        """Stop sampling; return bytes."""
        self._end.set()
        self._thread.join()
        return max(self._most, _memory()[1])


def main() -> None:
    """Measure, print, and compare the memory with what is allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--views", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None, help="writes the figures there as well")
    parser.add_argument("--checkpoint", type=parse_count, help="instead: of a run with so many Gaussians")
    given = parser.parse_args()
    console = Console()
    if given.checkpoint:
        checkpoint(given.checkpoint, given.ranks, console, given.json)
        return
    # Not forked: shared memory of forked processes belongs to no single one.
    ranks: list[Measured] = run_ranks(measure, given.ranks, given.views, device=given.device, seconds=3600, fork=False)
    table = empty_table(
        f"{given.views} images of {SHAPE.width}x{SHAPE.height} on {given.ranks} {given.device}: GB",
        ("rank", "images", "share", "PSS before", "PSS after", "at most"),
    )
    for rank, r in enumerate(ranks):
        sizes = (r.held, r.pss_before, r.pss_after, r.peak)
        table.add_row(str(rank), str(r.images), *(f"{size / 1e9:.2f}" for size in sizes))
    copy = given.views * SHAPE.nbytes
    copies = {
        "pss_copies": sum(r.pss_after - r.pss_before for r in ranks) / copy,
        "uss_copies": sum(r.uss_after - r.uss_before for r in ranks) / copy,
        "peak_copies": sum(r.peak - r.pss_before for r in ranks) / copy,
    }
    console.print(table)
    console.print(
        f"One uint8 copy is {copy / 1e9:.2f} GB. The ranks took {copies['pss_copies']:.3f} copies (PSS; USS "
        f"{copies['uss_copies']:.3f}), and {copies['peak_copies']:.3f} at most, in "
        f"{max(r.seconds for r in ranks):.1f} s; the processes themselves hold "
        f"{sum(r.pss_before for r in ranks) / 1e9:.2f} GB."
    )
    write_report(given.json, views=given.views, copy_gb=copy / 1e9, **copies, ranks=[asdict(r) for r in ranks])
    if copies["pss_copies"] > ALLOWED:
        raise SystemExit(f"{copies['pss_copies']:.2f} copies are more than the {ALLOWED} allowed")


if __name__ == "__main__":
    main()
