"""Ranks that are threads of one process, splats that are spread over ranks, and pieces of runs, for the tests of the
sort over ranks."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cuda_ext import intersect_capacity
from tests.cuda_ext.splats import Splats


class SimulatedMemory:
    """A rank's view of all ranks' buffers, all in this process, on one device and one stream."""

    def __init__(self, rank: int, buffers: Sequence[Tensor], gate: threading.Barrier) -> None:
        self.local, self.addresses, self._gate = buffers[rank], [b.data_ptr() for b in buffers], gate

    def barrier(self) -> None:
        self._gate.wait(60)


def simulate(size: int, nbytes: int, device: str, function: Callable[[int, SimulatedMemory], Any]) -> list[Any]:
    """Return the results of `function(rank, memory)` by rank, each with `nbytes` bytes of uninitialized memory."""
    gate = threading.Barrier(size)
    buffers = [torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=device) for _ in range(size)]

    def run(rank: int) -> Any:
        try:
            return function(rank, SimulatedMemory(rank, buffers, gate))
        except BaseException:
            gate.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        results = [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
    if device == "cuda":
        torch.cuda.synchronize()
    return results


def fragments_of(length: int, ranks: int) -> list[tuple[int, int]]:
    """Return the pieces [first, end) of a run."""
    return list(pairwise(rank * length // ranks for rank in range(ranks + 1)))


def padded(values: Tensor, capacity: int, rubbish: int = -7) -> Tensor:
    """Return [capacity], rubbish behind the values."""
    return torch.cat([values, values.new_full((capacity - len(values),), rubbish)])


def share_out(splats: Splats, cuts: Sequence[int]) -> list[Splats]:
    """Shards of the splats: row k goes to the shard whose number is k's in the order of `cuts`, keeping the views'
    order; cuts [M] are shard numbers."""
    owners = torch.tensor(cuts)
    names = ("means2d", "conics", "row_opacities", "features", "radii", "depths", "view_ids")
    return [
        replace(splats, **{name: getattr(splats, name)[owners == shard] for name in names})
        for shard in range(max(cuts) + 1)
    ]


def view_sizes(splats: Splats) -> list[int]:
    """Return (width, height) of each view: the patches must be the whole views."""
    assert all(n == 0 for n in (*splats.patches[1::5], *splats.patches[2::5]))
    return [n for k in range(0, len(splats.patches), 5) for n in splats.patches[k + 3 : k + 5]]


def bands_of(sizes: Sequence[int], bands: Sequence[tuple[int, int, int]], tile: int) -> tuple[list[int], list[int]]:
    """Tiles (first, end) and patches (view, x0, y0, x1, y1) of bands (view, first row of tiles, end row)."""
    columns = [-(-w // tile) for w in sizes[::2]]
    tiles_before = [0]
    for w, h in zip(columns, sizes[1::2], strict=True):
        tiles_before.append(tiles_before[-1] + w * -(-h // tile))
    tiles, patches = [], []
    for view, first, end in bands:
        tiles += [tiles_before[view] + columns[view] * row for row in (first, end)]
        width, height = sizes[2 * view : 2 * view + 2]
        patches += [view, 0, min(tile * first, height), width, min(tile * end, height)]
    return tiles, patches


def random_bands(sizes: Sequence[int], ranks: int, tile: int, seed: int) -> list[list[tuple[int, int, int]]]:
    """Bands of each rank, a random number of them, which may overlap or be empty."""
    g = torch.Generator().manual_seed(seed)
    bands: list[list[tuple[int, int, int]]] = []
    for _ in range(ranks):
        own = []
        for _ in range(int(torch.randint(0, 4, (1,), generator=g))):
            view = int(torch.randint(0, len(sizes) // 2, (1,), generator=g))
            rows = -(-sizes[2 * view + 1] // tile)
            first, end = torch.randint(0, rows + 1, (2,), generator=g).sort().values.tolist()
            own.append((view, first, end))
        bands.append(own)
    return bands


def received(shards: Sequence[Splats], seed: int, lines: int = 10) -> tuple[Tensor, int]:
    """Return a table `where` [owners, rows] and a segment's length, for a rank that has received all rows, not in order
    of lines that would follow from the rows: each owner's are some lines further down."""
    rows = max(1, *(len(shard.depths) for shard in shards))
    where = torch.full((len(shards), rows), -1, dtype=torch.int32)
    for owner, shard in enumerate(shards):
        count = len(shard.depths)
        where[owner, :count] = torch.arange(count, dtype=torch.int32) + (seed + owner) % lines
    return where, rows + lines


def expected_lists(
    shards: Sequence[Splats], patches: Sequence[int], where: Tensor, segment: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lists of `intersect_capacity` for the rows of all shards, as lines of received rows."""
    order = torch.sort(torch.cat([shard.view_ids for shard in shards]), stable=True).indices
    names = ("means2d", "conics", "row_opacities", "radii", "depths", "view_ids")
    rows = {name: torch.cat([getattr(shard, name) for shard in shards])[order] for name in names}
    lines = torch.cat([where[o, : len(s.depths)] + o * segment for o, s in enumerate(shards)])[order]
    offsets, ids, count = intersect_capacity(*rows.values(), patches, shards[0].tile_size, capacity)
    none = torch.full_like(ids, -1)
    return offsets, torch.where(ids >= 0, lines[ids.long()] if len(lines) else none, none).int(), count
