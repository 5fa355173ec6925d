"""Measure the host memory of a capture's images, over all ranks of a machine.

    python -m benchmarks.scaling.host_memory [--views 2000 --ranks 4] [--device cuda] [--json FILE]

Every rank makes its share of images of random numbers as training does, and reports the memory of its process before
and after.
"""

import argparse
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console

from benchmarks.lib.report import empty_table, write_report
from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.image_share import ImageShare
from ns_multigpu.plugin.capture.image_store import ImageData, ImageShape
from tests.lib.ranks import run_ranks

ALLOWED = 1.2
"""Times one uint8 copy of the capture that all ranks together may take."""
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
    given = parser.parse_args()
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
    console = Console()
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
