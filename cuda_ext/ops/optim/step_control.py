"""Step statistics of a fused step, and the decision whether it is taken, both on the device.

A rank counts its rows and intersections during the step. All ranks publish their counts (`step_message`) and make the
same decision (`step_gate`): if any rank exceeds a capacity, parameters do not change. Either is one launch on CUDA,
reads nothing back and can be captured in a CUDA graph. Where our CUDA kernels do not serve (on CPU, with
the reference), the same is put together from some twenty of torch's operators.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.ops.common.checks import check_tensors
from cuda_ext.ops.optim.adam import kernels_serve
from cuda_ext.ops.optim.lazy_adam import MOST_STEPS, LazyAdam

HEAD = 4
"""Numbers of a message before the rows of tiles: own rows, rows that the fullest segment exceeds its capacity by,
intersections, rows sent."""
_MOST_LIMITS = 4


@torch.no_grad()
def step_message(
    own_rows: Tensor,
    segment_counts: Tensor,
    segment_capacity: Tensor,
    segment_most: Tensor,
    met: Tensor,
    tile_offsets: Tensor,
    bands: Sequence[int],
    rank: int,
    lines: int,
) -> Tensor:
    """Return the step statistics that a rank publishes at the end of a step.

    Args:
        own_rows: [1] int64, the rows of this rank's points.
        segment_counts: [ranks] int64, `route_lines`'s: the rows to each rank.
        segment_capacity: [ranks] int64, capacity in rows of the segment to each rank.
        segment_most: [ranks] int64, raised to `segment_counts` where these are more.
        met: [1] int64, the number of intersections required.
        tile_offsets: [T + 1] int32 of this rank's patches, as `intersect_capacity` returns them.
        bands: 4 integers for each stretch of whole rows of tiles that this rank owns (line, tile, count, columns): the
            first of its `count` lines in the result, where its first tile stands in `tile_offsets`, and the tiles of a
            row. Lines of two bands differ.
        rank: this one.
        lines: rows of tiles of all views.

    Returns:
        [HEAD + lines] int64: own rows; the most by which the rows to one rank (this one included) exceed its capacity,
        negative if none does; the intersections, the rows that go to other ranks, and the intersections of each row of
        tiles of this rank's bands; zero for those of other ranks.

    Raises:
        TypeError, ValueError: types or shapes are wrong, or a band leaves the lines or the tiles.
        NativeBuildError: the operators cannot be compiled.
    """
    check_tensors(
        torch.int64, met.device, own_rows=(own_rows, (1,)), segment_counts=(segment_counts, (-1,)), met=(met, (1,))
    )
    check_tensors(torch.int32, met.device, tile_offsets=(tile_offsets, (-1,)))
    if not 0 <= rank < len(segment_counts):
        raise ValueError(
            f"A message is of one of the {len(segment_counts)} ranks that have a segment, not of rank {rank}."
        )
    of_ranks = (len(segment_counts),)
    check_tensors(
        torch.int64, met.device, segment_capacity=(segment_capacity, of_ranks), segment_most=(segment_most, of_ranks)
    )
    numbers = [int(number) for number in bands]
    if len(numbers) % 4:
        raise ValueError(f"bands holds (line, tile, count, columns) a band; got {len(numbers)} integers.")
    for line, tile, count, columns in zip(*[iter(numbers)] * 4, strict=True):
        within = line + count <= lines and tile + count * columns < len(tile_offsets)
        if min(line, tile, count, columns - 1) < 0 or not within:
            raise ValueError(
                f"band (line, tile, count, columns) = {(line, tile, count, columns)} leaves the {lines} lines or the "
                f"{len(tile_offsets) - 1} tiles."
            )
    op: Any = torch.ops.ns_multigpu.step_message if kernels_serve(met) else _message_composed
    return op(own_rows, segment_counts, segment_capacity, segment_most, met, tile_offsets, numbers, rank, lines)


@torch.no_grad()
def step_gate(
    counts: Sequence[Tensor],
    limits: Tensor,
    status: Tensor,
    scalars: Tensor,
    still: Tensor,
    row_counts: Tensor,
    lazy: LazyAdam | None = None,
    sent: Tensor | None = None,
    work: Tensor | None = None,
    totals: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decide whether a step is taken, count it, and return the inputs of `splat_update`.

    It is taken unless a count exceeds its limit on any rank, or a step before was not taken since `status` was zero, or
    the number of deferred steps is at its maximum. All ranks decide the same if all give the same counts.

    Args:
        counts: up to 4 tensors [ranks] int64, of any stride: what each rank has of one thing.
        limits: [K] int64, of each of the K counts.
        status: [K + 2] int64, written: steps taken, the most of each count on any rank since it was zero (also in steps
            not taken), and 1 if a step was not taken; with `sent` [K + 3], and the sum of that.
        scalars: Adam's, as `splat_update` takes them.
        still: of the same shape and type: scalars with which Adam changes nothing (rate 0, betas 1).
        row_counts: [S] int64, of any stride: the rows of each segment.
        lazy: state of the deferred steps. Only its `steps` is read.
        sent: [1] int64, added to the status.
        work: [ranks, n] int64, whose rows may lie apart. totals: n numbers int64, contiguous in any shape: written, the
            sums over ranks. Both or neither.

    Returns:
        `scalars` and `row_counts` if the step is taken, else `still` and zeros; contiguous copies.

    Raises:
        TypeError, ValueError: types or shapes are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    num_limits = len(counts)
    if not 1 <= num_limits <= _MOST_LIMITS or len(counts[0]) < 1:
        raise ValueError(f"counts must be 1 to {_MOST_LIMITS} tensors [ranks], not {num_limits}.")
    device, ranks = scalars.device, len(counts[0])
    of_status = num_limits + 2 + (sent is not None)
    wanted = {f"counts[{k}]": (count, (ranks,)) for k, count in enumerate(counts)}
    wanted |= {"limits": (limits, (num_limits,)), "status": (status, (of_status,)), "row_counts": (row_counts, (-1,))}
    if sent is not None:
        wanted["sent"] = (sent, (1,))
    if (work is None) != (totals is None):
        raise ValueError("work and totals belong together: give both or neither.")
    if work is not None and totals is not None:
        wanted |= {"work": (work, (ranks, totals.numel())), "totals": (totals, totals.shape)}
        if not totals.is_contiguous():
            raise ValueError("totals must be contiguous: they are written in place.")
    check_tensors(torch.int64, device, **wanted)
    check_tensors(scalars.dtype, device, still=(still, scalars.shape))
    steps = None
    if lazy is not None:
        check_tensors(torch.int32, device, steps=(lazy.steps, (1,)))
        steps = lazy.steps
    op: Any = torch.ops.ns_multigpu.step_gate if kernels_serve(scalars) else _gate_composed
    return op(list(counts), limits, status, scalars, still, row_counts, steps, MOST_STEPS, sent, work, totals)


@torch.no_grad()
def _message_composed(
    own_rows: Tensor, segment_counts: Tensor, segment_capacity: Tensor, segment_most: Tensor, met: Tensor,
    tile_offsets: Tensor, bands: Sequence[int], rank: int, lines: int,
) -> Tensor:  # fmt: skip
    work = torch.zeros(lines, dtype=torch.int64, device=met.device)
    for k in range(0, len(bands), 4):
        line, tile, count, columns = bands[k : k + 4]
        ends = tile_offsets[tile : tile + count * columns + 1 : columns].long()
        work[line : line + count] = ends.diff()
    sent = segment_counts.sum() - segment_counts[rank]
    torch.maximum(segment_most, segment_counts, out=segment_most)
    lacking = (segment_counts - segment_capacity).amax(dim=0, keepdim=True)
    head = [own_rows, lacking, met, sent.view(1)]
    return torch.cat([*head, work])


@torch.no_grad()
def _gate_composed(
    counts: Sequence[Tensor], limits: Tensor, status: Tensor, scalars: Tensor, still: Tensor, row_counts: Tensor,
    lazy_steps: Tensor | None, most_steps: int, sent: Tensor | None, work: Tensor | None, totals: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_limits = len(counts)
    most = torch.stack([count.amax() for count in counts])
    full = (most > limits).any() | (status[num_limits + 1] > 0)
    if lazy_steps is not None:
        full = full | (lazy_steps[0] >= most_steps)
    if work is not None and totals is not None:
        totals.copy_(work.sum(dim=0).view_as(totals))
    status[0] += 1 - full.long()
    status[1 : num_limits + 2] = torch.maximum(status[1 : num_limits + 2], torch.cat([most, full.long().view(1)]))
    if sent is not None:
        status[num_limits + 2 :] += sent
    return torch.where(full, still, scalars), torch.where(full, torch.zeros_like(row_counts), row_counts)


LIBRARY.impl("step_message", _message_composed, "CPU")
LIBRARY.impl("step_gate", _gate_composed, "CPU")
