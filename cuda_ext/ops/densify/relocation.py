"""Operators of refinements, one launch each in place of dozens of torch operators.

`draw_sources`, `copy_rows` and `share_out` relocate invisible points onto others (Kheradmand et al. 2024,
"3D Gaussian Splatting as Markov Chain Monte Carlo", section 3): who becomes a copy of whom, the copies themselves, and
what a point and its copies must be to look the same. The device alone knows how many there are. So the host can order
it before the device has come so far. `take_rows` and `turn` serve refinements that make new points.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY, serve_cpu
from cuda_ext.dispatch.load import kernels_serve
from cuda_ext.ops.common.checks import check_floats, check_tensors
from cuda_ext.reference import quaternions
from cuda_ext.reference import relocation as reference


@torch.no_grad()
def draw_sources(sums: Tensor, empty: Tensor, *, start: int, taken: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw a point for each empty place, with replacement, in proportion to integer weights.

    Draw k, for the k-th empty place, is SplitMix64's 63-bit number of (start, k), modulo the weights' sum
    (`cuda_ext.reference.relocation.draws`). It is exact: the same inputs draw the same points on every device.

    Args:
        sums: [N] int64, running sums of the weights; the last is below 2^62. empty: [N] bool, places to fill; their
            weights are to be 0. start: of the table of draws.
        taken: [] bool on the device; nothing is drawn where it is False.

    Returns:
        [N] int32, the point drawn for each empty place; -1 for others, and for all where all weights are 0.
        [N] int32, how often each point was drawn.

    Raises:
        TypeError, ValueError: types or shapes are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    count, device = len(sums), sums.device
    check_tensors(torch.int64, device, sums=(sums, (-1,)))
    check_tensors(torch.bool, device, empty=(empty, (count,)), **({} if taken is None else {"taken": (taken, ())}))
    op: Any = torch.ops.ns_multigpu.draw_sources if kernels_serve(sums) else reference.draw_sources
    return op(sums, empty, empty.cumsum(0), start, taken)  # type: ignore[no-any-return]


@torch.no_grad()
def share_out(
    means: Tensor, quats: Tensor, log_scales: Tensor, logits: Tensor, copies: Tensor, *, min_opacity: float,
    sources: Tensor | None = None, numbers: Tensor | None = None, cleared: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    """Place a point and its copies in a row along its longest axis, in place, so that together they look as it did
    alone.

    Of N parts, the point itself being number 0, part i moves by up to (2 i + 1 - N) / N standard deviations. All get
    the same share of the opacity and the same, shorter longest scale (`cuda_ext.reference.relocation.shares`).

    Args:
        means: [N, 3]. quats: [N, 4]. log_scales: [N, 3]. logits: [N] of opacities. All contiguous.
        copies: [N] int32, see `draw_sources`.
        min_opacity: no opacity becomes less.
        sources: [N] int32, whose copy a row has become (`copy_rows`), -1 for none; None if copies are in other tensors.
            There each may be its own source, with the source's number of copies.
        numbers: [N] int32, the number from 1 of each copy among its source's.
        cleared: [N, ...] each, contiguous: rows of points that get copies become 0.

    Raises:
        TypeError, ValueError: types or shapes are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    count = len(means)
    check_floats(
        means, means=(means, (count, 3)), quats=(quats, (count, 4)), log_scales=(log_scales, (count, 3)),
        logits=(logits, (count,)),
    )  # fmt: skip
    given = {"copies": copies, "sources": sources, "numbers": numbers}
    check_tensors(torch.int32, means.device, **{name: (x, (count,)) for name, x in given.items() if x is not None})
    _check_rows(cleared, count)
    op: Any = torch.ops.ns_multigpu.share_out if kernels_serve(means) else reference.share_out
    op(means, quats, log_scales, logits, copies, sources, numbers, min_opacity, list(cleared))


@torch.no_grad()
def copy_rows(tensors: Sequence[Tensor], sources: Tensor) -> None:
    """Copy row sources[i] of each tensor to row i, in place, unless sources[i] is -1.

    Args:
        tensors: [N, ...] each, contiguous. sources: [N] int32. No row may be both copied and written.

    Raises:
        TypeError, ValueError: types or shapes are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    check_tensors(torch.int32, sources.device, sources=(sources, (-1,)))
    _check_rows(tensors, len(sources))
    op: Any = torch.ops.ns_multigpu.copy_rows if kernels_serve(sources) else reference.copy_rows
    op(list(tensors), sources)


@torch.no_grad()
def take_rows(tensors: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """Return some rows of each tensor, in one launch: row i of each result is row index[i].

    Args:
        tensors: [N, ...] each. index: [M] int64 in [0, N); not checked on CUDA.

    Returns:
        [M, ...] each.

    Raises:
        TypeError, ValueError: types or shapes are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    check_tensors(torch.int64, index.device, index=(index, (-1,)))
    op: Any = torch.ops.ns_multigpu.take_rows if kernels_serve(index) else reference.take_rows
    return op([tensor.detach() for tensor in tensors], index)  # type: ignore[no-any-return]


@torch.no_grad()
def turn(quats: Tensor, vectors: Tensor) -> Tensor:
    """Rotate vectors by quaternions. Each row is computed independently of the others.

    Args:
        quats: [M, 4] (w, x, y, z) of any length but zero. vectors: [B, M, 3].

    Returns:
        [B, M, 3].

    Raises:
        TypeError, ValueError: types or shapes are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    count = len(quats)
    check_floats(quats, quats=(quats, (count, 4)), vectors=(vectors, (-1, count, 3)))
    op: Any = torch.ops.ns_multigpu.turn if kernels_serve(quats) else quaternions.turn
    return op(quats.detach(), vectors)  # type: ignore[no-any-return]


def _check_rows(tensors: Sequence[Tensor], count: int) -> None:
    for tensor in tensors:
        if tensor.dim() == 0 or len(tensor) != count or not tensor.is_contiguous():
            raise ValueError(f"tensors of rows must be contiguous and have {count} rows; one is {list(tensor.shape)}.")


serve_cpu(reference, "draw_sources", "share_out", "copy_rows", "take_rows")
LIBRARY.impl("turn", quaternions.turn, "CPU")
