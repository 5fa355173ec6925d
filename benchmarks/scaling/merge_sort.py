"""The sort over GPUs by merge paths in peer memory: keys a second, against CUB's radix sort on one GPU.

    python -m benchmarks.scaling.merge_sort --json benchmarks/results/merge_sort.json

Random 64-bit keys with 32-bit values, spread evenly; the same operators on 1, 2 and 4 GPUs of the machine, on one of
which nothing is merged: that is CUB. Times are of the slowest rank, medians of several runs between CUDA events, all
barriers included. Every outcome is checked: sorted within and between ranks, and nothing lost. Without a GPU
(`--device cpu`) it sorts a few keys by collectives over gloo: to see that it runs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from torch import Tensor

import cuda_ext
from benchmarks.lib.lockstep import Clock, over_ranks
from benchmarks.lib.report import empty_table, write_report
from cuda_ext.ops.sort.peer_sort import sort_pairs
from ns_multigpu.core.dist.collectives import all_gather_ints, barrier
from ns_multigpu.core.dist.peer_memory import PeerBuffer
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.sort.peer_sort import SortBuffers, peer_merge_sort
from ns_multigpu.plugin.launch.processes import RankProcesses

MILLION = 2**20
SIZES = (16, 64, 256, 1024)
PAIR_BYTES = 12
TIMEOUT = timedelta(seconds=120)
HEAD_START = 2_000_000
"""Cycles, about a millisecond, that the GPU waits before a timed run: the host's launches are not what is timed."""


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Attributes:
        ranks: GPUs.
        keys: on all of them together.
        ms: from the keys as they are to the sorted pieces.
        sort_ms: of that, the sort of each rank's own pairs, measured by itself.
        merge_ms: the rest: counts, merges and barriers.
        giga_keys_per_second: keys / ms.
        read_gb_per_second: what a GPU read from its peers, half of what it merged, by merge_ms.
    """

    ranks: int
    keys: int
    ms: float
    sort_ms: float

    @property
    def merge_ms(self) -> float:
        return self.ms - self.sort_ms

    @property
    def giga_keys_per_second(self) -> float:
        return self.keys / self.ms / 1e6

    @property
    def read_gb_per_second(self) -> float:
        levels = (self.ranks - 1).bit_length()
        return levels * self.keys / self.ranks * PAIR_BYTES / 2 / self.merge_ms / 1e6 if levels else 0.0

    def plain(self) -> dict[str, float]:
        """Return all fields, for JSON."""
        derived = ("merge_ms", "giga_keys_per_second", "read_gb_per_second")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def timed(work: Callable[[], object], align: Callable[[], None], runs: int, world: World) -> float:
    """Return the slowest rank's milliseconds: the median of `runs`, after one that does not count."""
    times: list[float] = []
    for _ in range(runs + 1):
        align()
        clock = Clock(world.device)
        clock.mark()
        work()
        clock.mark()
        times.append(max(row[0] for row in over_ranks(clock.intervals(), world)))
    return statistics.median(times[1:])


def check(keys: Tensor, values: Tensor, sorted_keys: Tensor, sorted_values: Tensor, world: World) -> None:
    """Raise RuntimeError unless the ranks' parts are sorted and have the sums of the input."""
    ordered = len(sorted_keys) < 2 or bool((sorted_keys[1:] >= sorted_keys[:-1]).all())
    ends = [int(sorted_keys[0]), int(sorted_keys[-1])] if len(sorted_keys) else []
    # Products tie a value to its key; sums wrap around alike before and after.
    tied = [int((k * (v.long() + 1)).sum()) for k, v in ((keys, values), (sorted_keys, sorted_values))]
    table = all_gather_ints([int(ordered), len(keys), len(sorted_keys), *tied, *(ends or [0, 0])], world)
    fragments = [row[5:] for row in table if row[2]]
    between = all(a[1] <= b[0] for a, b in pairwise(fragments))
    sums = [sum(column) % 2**64 for column in zip(*(row[1:5] for row in table), strict=True)]
    if not (all(row[0] for row in table) and between and sums[0] == sums[1] and sums[2] == sums[3]):
        raise RuntimeError(f"{world.size} ranks did not sort {sums[0]} pairs: in and out {sums}, pieces {fragments}.")


def measure(world: World, sizes: list[int], runs: int) -> list[Figure]:
    """Measure all sizes on one world. The buffers are as large as the largest size needs."""
    cuda = world.device.type == "cuda"
    most = -(-max(sizes) // world.size)
    memory = PeerBuffer(SortBuffers.size(most, world.size), world) if cuda else None
    generator = torch.Generator(world.device).manual_seed(world.rank)
    figures: list[Figure] = []
    for size in sizes:
        count = size // world.size + (world.rank < size % world.size)
        capacity = -(-size // world.size)
        buffers = None if memory is None else SortBuffers(memory, capacity)
        keys = torch.randint(-(2**63), 2**63 - 1, (capacity,), device=world.device, generator=generator)
        values = torch.arange(capacity, dtype=torch.int32, device=world.device)
        number = torch.tensor([count], device=world.device)

        def align() -> None:
            barrier(world)
            if memory is not None:
                torch.cuda._sleep(HEAD_START)
                memory.barrier()

        def sort_all(keys: Tensor = keys, values: Tensor = values, number: Tensor = number,
                     buffers: SortBuffers | None = buffers) -> object:  # fmt: skip
            return peer_merge_sort(keys, values, number, buffers, world)

        def sort_own(keys: Tensor = keys, values: Tensor = values, number: Tensor = number,
                     buffers: SortBuffers | None = buffers) -> object:  # fmt: skip
            return sort_pairs(keys, values, number, out=None if buffers is None else buffers.pairs(0))

        result = peer_merge_sort(keys, values, number, buffers, world)
        got = int(result.count)
        check(keys[:count], values[:count], result.keys[:got], result.values[:got], world)
        del result
        sort_ms = timed(sort_own, align, runs, world)
        figures.append(Figure(world.size, size, timed(sort_all, align, runs, world), sort_ms))
        del keys, values, buffers, sort_all, sort_own
        if cuda:
            torch.cuda.empty_cache()
    return figures


def run_rank(sizes: list[int], runs: int, device: str, folder: str) -> None:
    """Measure on one rank; rank 0 writes the figures."""
    world = World.from_env(device, TIMEOUT)
    figures = measure(world, sizes, runs)
    if world.is_main:
        torch.save([asdict(figure) for figure in figures], Path(folder) / "figures.pt")
    barrier(world)
    world.close()


def show(console: Console, figures: list[Figure]) -> None:
    """Print the table."""
    heads = ("keys, M", "GPUs", "ms", "own sort, ms", "merges, ms", "Gkeys/s", "times 1 GPU", "read, GB/s a GPU")
    table = empty_table("Sort over GPUs: random 64-bit keys, 32-bit values", heads, left=())
    alone = {figure.keys: figure.ms for figure in figures if figure.ranks == 1}
    for figure in sorted(figures, key=lambda f: (f.keys, f.ranks)):
        times = f"{alone[figure.keys] / figure.ms:.2f}" if figure.keys in alone else ""
        merges = f"{figure.merge_ms:.3f}" if figure.ranks > 1 else ""
        read = f"{figure.read_gb_per_second:.0f}" if figure.ranks > 1 else ""
        table.add_row(
            f"{figure.keys / MILLION:.4g}", str(figure.ranks), f"{figure.ms:.3f}", f"{figure.sort_ms:.3f}", merges,
            f"{figure.giga_keys_per_second:.2f}", times, read,
        )  # fmt: skip
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", help=f"2^20 keys in all (default: {SIZES}; on a CPU 0.25)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="default: those of 1, 2 and 4 that the machine has GPUs for"
    )
    parser.add_argument("--runs", type=int, default=5, help="timed runs, of which the median counts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    console = Console()
    there = torch.cuda.device_count() if options.device == "cuda" else 4
    ranks = sorted(set(options.ranks or [number for number in (1, 2, 4) if number <= there]))
    if not ranks or ranks[0] < 1 or ranks[-1] > there:
        parser.error(f"--ranks {ranks}: this machine has {there} GPUs")
    sizes = [int(size * MILLION) for size in options.sizes or (SIZES if options.device == "cuda" else (0.25,))]
    if min(sizes) < 1 or max(sizes) // ranks[0] >= 2**31:
        parser.error("--sizes: a rank sorts 1 to 2^31 - 1 keys")
    cuda_ext.build_native(options.device)  # once, before there are ranks
    began = time.perf_counter()
    figures: list[Figure] = []
    for size in ranks:
        with TemporaryDirectory(prefix="merge-sort-") as folder:
            RankProcesses(run_rank, (sizes, options.runs, options.device, folder), size, fork=False).wait()
            found = torch.load(Path(folder) / "figures.pt", weights_only=True)
        figures += [Figure(**one) for one in found]
        console.print(f"{size} ranks: {time.perf_counter() - began:.0f} s since the start")
    show(console, figures)
    settings = {"sizes": sizes, "ranks": ranks, "runs": options.runs, "device": options.device}
    write_report(options.json, benchmark="merge_sort", **settings, figures=[f.plain() for f in figures])
    return 0


if __name__ == "__main__":
    sys.exit(main())
