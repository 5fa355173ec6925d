"""Sorting pairs of key and value that are spread over ranks, in each other's memory, and the lists of rows for
rendering that come of it.

Each rank sorts its own pairs (`sort_pairs`) and publishes their number (`publish_count`); then the sorted
runs are merged in pairs, level by level (`merge_level`), by merge paths (Green, Odeh and Birk 2014; over GPUs:
torch-dgx, section 4). A run lies on consecutive ranks, in pieces of equal length: of a run of n on k ranks, the j-th of
them holds [j n / k, (j + 1) n / k), rounded down. `ns_multigpu.core.sort.peer_sort` puts this together.

Keys are int64, values int32. Addresses are numbers, one a rank: on CUDA of memory of any GPU accessible from here, on
CPU of memory of this process. They are trusted: a wrong one is a wrong read or write. On CUDA nothing is read back, so
that a CUDA graph can hold all of these; who orders writers and readers of a buffer is the caller's business.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import serve_cpu
from cuda_ext.ops.common.checks import check_floats, check_tensors
from cuda_ext.ops.optim.adam import kernels_serve
from cuda_ext.ops.sort import peer_sort_composed as composed
from cuda_ext.ops.sort.peer_sort_composed import LARGEST_KEY, MOST_OWNERS, MOST_ROWS, OWNER_SHIFT

__all__ = [
    "LARGEST_KEY",
    "MOST_OWNERS",
    "MOST_RANKS",
    "MOST_ROWS",
    "OWNER_SHIFT",
    "band_lists",
    "intersect_keys",
    "merge_level",
    "publish_count",
    "sort_pairs",
]

MOST_RANKS = 32
"""Ranks whose addresses fit a kernel's parameters."""


def sort_pairs(
    keys: Tensor,
    values: Tensor,
    count: Tensor,
    begin_bit: int = 0,
    end_bit: int = 64,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sort the first `count` of C pairs by key. Stable, and never waits for the device.

    Args:
        keys: [C] int64; behind `count` they are overwritten with the largest key.
        values: [C] int32.
        count: [1] int64 on the same device; of more than C, C are sorted.
        begin_bit, end_bit: which bits of the keys to look at, as an unsigned number (to 64: as a signed one). Fewer
            bits sort faster; the others must be equal, or the pairs must be in their order already.
        out: where to put the sorted keys and values, [C] each, contiguous, not overlapping the inputs; else new.

    Returns:
        sorted keys [C] and values [C]; those behind `count` come last and mean nothing.

    Raises:
        TypeError, ValueError: types, devices, shapes or bits are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    _check_pairs(keys, values)
    check_tensors(torch.int64, keys.device, count=(count, (1,)))
    if not 0 <= begin_bit < end_bit <= 64:
        raise ValueError(f"bits [{begin_bit}, {end_bit}) of a key: need 0 <= begin_bit < end_bit <= 64.")
    out_keys, out_values = (torch.empty_like(keys), torch.empty_like(values)) if out is None else out
    _check_pairs(out_keys, out_values, keys)
    _check_written(keys=keys, out_keys=out_keys, out_values=out_values)
    op: Any = torch.ops.ns_multigpu.sort_pairs if kernels_serve(keys) else composed.sort_pairs
    op(keys, values, count, begin_bit, end_bit, out_keys, out_values)
    return out_keys, out_values


def publish_count(count: Tensor, addresses: Sequence[int], limit: int) -> None:
    """Write a number to the given address on every rank.

    Args:
        count: [1] int64.
        addresses: of an int64 each, one a rank.
        limit: of a larger count, this is written instead.

    Raises:
        TypeError, ValueError: `count` is something else, or there are no ranks or over MOST_RANKS.
        NativeBuildError: the operators cannot be compiled.
    """
    check_tensors(torch.int64, count.device, count=(count, (1,)))
    _check_addresses(addresses=addresses)
    op: Any = torch.ops.ns_multigpu.publish_count if kernels_serve(count) else composed.publish_count
    op(count, list(addresses), limit)


def merge_level(
    keys_at: Sequence[int],
    values_at: Sequence[int],
    counts: Tensor,
    left: tuple[int, int],
    right: tuple[int, int],
    rank: int,
    out: tuple[Tensor, Tensor],
) -> Tensor:
    """Merge two neighbouring sorted runs: this rank's piece of the result. Stable: of equal keys the left run's first.

    All ranks of both runs call it at the same time, each for its own piece, when both runs are in place. The pieces of
    the result have equal length, as those of the runs have. A run of one rank is what `sort_pairs` has left there.

    Args:
        keys_at: addresses of each rank's keys, sorted.
        values_at: addresses of each rank's values.
        counts: [ranks] int64: how many pairs each rank *started* with; all runs' lengths follow.
        left: the ranks [first, end) that the left run lies on.
        right: those of the right run, which begin where the left run's end.
        rank: this one, of either run.
        out: [C] int64 and [C] int32 for this rank's piece, contiguous, in no run's memory. Pairs beyond C are dropped,
            and there are none where no rank started with more than C.

    Returns:
        count [1] int64: how long the piece is.

    Raises:
        TypeError, ValueError: types, devices, shapes or ranks are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    out_keys, out_values = out
    _check_pairs(out_keys, out_values)
    _check_written(out_keys=out_keys, out_values=out_values)
    _check_addresses(keys_at=keys_at, values_at=values_at)
    ranks = len(keys_at)
    check_tensors(torch.int64, out_keys.device, counts=(counts, (ranks,)))
    (first, middle), end = left, right[1]
    if not (0 <= first < middle == right[0] < end <= ranks and first <= rank < end):
        raise ValueError(
            f"merge_level: the runs on ranks [{first}, {middle}) and [{right[0]}, {end}) of {ranks}, merged by rank "
            f"{rank}: they must be neighbours, none empty, and the rank must be of one of them."
        )
    op: Any = torch.ops.ns_multigpu.merge_level if kernels_serve(out_keys) else composed.merge_level
    return op(list(keys_at), list(values_at), counts, first, middle, end, rank, out_keys, out_values)


def intersect_keys(
    means2d: Tensor,
    conics: Tensor,
    row_opacities: Tensor,
    radii: Tensor,
    depths: Tensor,
    view_ids: Tensor,
    sizes: Sequence[int],
    tile_size: int,
    owner: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs of tile and row of `intersect` over whole views, as keys that sort by tile, then depth.

    The tiles are those of all views, view after view, row-major in a view. Pairs come by depth, ties by row, so that
    sorting them stably by the bits from 32 on (`sort_pairs` with begin_bit=32) sorts them by the whole key; of equal
    keys the rows are ascending. Never waits for the device.

    Args:
        means2d, conics, row_opacities, radii, depths, view_ids, tile_size: as `intersect`, in float32, at most 2^28
            rows.
        sizes: (width, height) of each view, 2 V ints.
        owner: whose rows these are, 0..15.
        capacity: C, 0 to 2^31 - 2. On CUDA each takes 12 bytes.

    Returns:
        keys [C] int64: tile << 32 | the depth's bits as an unsigned number of the same order; LARGEST_KEY behind the
        last pair. values [C] int32: owner << 28 | row, as the bits of an unsigned number. count [1] int64, the true
        number of pairs. Where it is above the capacity the farthest are missing: retry the step with a larger capacity.

    Raises:
        TypeError, ValueError: types, shapes, sizes, owner or capacity are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    rows = means2d.shape[0]
    check_floats(
        means2d,
        means2d=(means2d, (-1, 2)),
        conics=(conics, (rows, 3)),
        row_opacities=(row_opacities, (rows,)),
        depths=(depths, (rows,)),
    )
    if means2d.dtype != torch.float32:
        raise TypeError(f"intersect_keys: depths of {means2d.dtype} do not fit a key; they must be torch.float32.")
    check_tensors(torch.int32, means2d.device, radii=(radii, (rows, 2)), view_ids=(view_ids, (rows,)))
    if rows > MOST_ROWS or not 0 <= owner < MOST_OWNERS:
        raise ValueError(f"intersect_keys: {rows} rows of owner {owner}; values hold {MOST_ROWS} of {MOST_OWNERS}.")
    if not 1 <= tile_size <= 64:
        raise ValueError(f"tile_size must lie in 1..64, got {tile_size}.")
    if len(sizes) % 2 or any(number < 0 for number in sizes):
        raise ValueError(f"sizes holds 2 integers a view (width, height), none below 0; got {list(sizes)}.")
    _check_capacity("intersect_keys", capacity)
    op: Any = torch.ops.ns_multigpu.intersect_keys if kernels_serve(means2d) else composed.intersect_keys
    return op(
        means2d, conics, row_opacities, radii, depths, view_ids, [int(n) for n in sizes], tile_size, owner, capacity
    )


def band_lists(
    keys_at: Sequence[int],
    values_at: Sequence[int],
    counts: Tensor,
    bands: Sequence[int],
    where: Tensor,
    segment: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lists of rows of some tiles, out of the sorted pairs of `intersect_keys` that all ranks hold together.

    They are what `intersect_capacity` gives on the received rows, for the patches that those tiles make up (whole rows
    of tiles of a view, from a tile's corner on). Never waits for the device.

    Args:
        keys_at, values_at: addresses of each rank's piece of the sorted run over all of them.
        counts: [ranks] int64: how many pairs each rank *started* with. One rank with one piece is fine.
        bands: (first tile, end tile) of each patch among the tiles of all views; they may overlap.
        where: [owners, rows] int32: the line in its owner's segment at which this rank has received a row.
        segment: lines of a segment, at least 1: row r of owner o is on line o * segment + where[o, r].
        capacity: C, 0 to 2^31 - 2.

    Returns:
        tile_offsets [T+1] int32, row_ids [C] int32 (-1 behind the last list) and count [1] int64, the true number of
        pairs, as `intersect_capacity`; the tiles are those of the bands, band after band. A row that was not
        received, for lack of capacity, is listed as some line of its owner's. Then retry the step, as if the count had
        exceeded the capacity.

    Raises:
        TypeError, ValueError: types, devices, shapes, bands, segment or capacity are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    _check_addresses(keys_at=keys_at, values_at=values_at)
    check_tensors(torch.int64, counts.device, counts=(counts, (len(keys_at),)))
    check_tensors(torch.int32, counts.device, where=(where, (-1, -1)))
    if where.numel() == 0 or segment < 1 or segment * where.shape[0] >= 2**31 - 1:
        raise ValueError(
            f"band_lists: where {list(where.shape)} and segments of {segment} lines; both need at least one line an "
            "owner, and lines must lie in 0..2^31 - 2."
        )
    if len(bands) % 2 or any(not 0 <= a <= b < 2**31 - 1 for a, b in zip(bands[::2], bands[1::2], strict=True)):
        raise ValueError(f"bands holds 2 integers a band (first tile, end tile), ascending; got {list(bands)}.")
    _check_capacity("band_lists", capacity)
    op: Any = torch.ops.ns_multigpu.band_lists if kernels_serve(counts) else composed.band_lists
    return op(list(keys_at), list(values_at), counts, [int(n) for n in bands], where, segment, capacity)


def _check_pairs(keys: Tensor, values: Tensor, like: Tensor | None = None) -> None:
    like = keys if like is None else like
    check_tensors(torch.int64, like.device, keys=(keys, (like.shape[0] if like.dim() else 0,)))
    check_tensors(torch.int32, like.device, values=(values, (like.shape[0],)))


def _check_written(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous: it is written to.")


def _check_addresses(**tables: Sequence[int]) -> None:
    sizes = {len(table) for table in tables.values()}
    if len(sizes) != 1 or not 1 <= min(sizes) <= MOST_RANKS:
        raise ValueError(f"{' and '.join(tables)} must hold one address a rank, of 1 to {MOST_RANKS} ranks.")


def _check_capacity(name: str, capacity: int) -> None:
    if not 0 <= capacity < 2**31 - 1:
        raise ValueError(f"{name}: capacity must lie in 0..2^31 - 2, got {capacity}.")


serve_cpu(composed, "sort_pairs", "publish_count", "merge_level", "intersect_keys", "band_lists")
