"""Publication of the used lines of several arrays in the memory of other ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import kernels_serve
from cuda_ext.reference import put_rows as composed

MOST_ARRAYS = 8
"""Maximum number of arrays per call: the capacity of the kernel's parameters."""


@torch.no_grad()
def put_rows(
    arrays: Sequence[Tensor],
    taken: Sequence[int],
    count: Tensor,
    destinations: Tensor,
    gate: Tensor | None = None,
    gate_column: int = 0,
    offset: int = 0,
) -> None:
    """Write the first `count` lines of each array to each rank's memory.

    Nothing else is written there, except perhaps words of these lines that are not selected. Addresses are trusted, as
    those of `cuda_ext.ops.exchange.row_exchange` are. On CUDA nothing is read back.

    Args:
        arrays: 1 to 8 of [M, ...], contiguous, of numbers of 4 bytes, from a multiple of 16 bytes on.
        taken: how many words of a line are taken of each: all, none, or the first some where a line has a multiple of
            4.
        count: [1] int64, how many lines there are; more than M count as M.
        destinations: [ranks, arrays] int64, addresses of memory for M lines each, multiples of 16.
        gate: [M, G] float32: the last array's lines are float32, and of their columns `gate_column` to `gate_column`
            + G - 1 are written as zero where the gate is not above zero.
        offset: is added to all words of the first array, which is int32 then, with no multiple of 4 a line.

    Raises:
        TypeError, ValueError: types, shapes or numbers are wrong.
        RuntimeError: on CUDA without our kernels: nothing else writes to an address there.
        NativeBuildError: the operators cannot be compiled.
    """
    if not 1 <= len(arrays) <= MOST_ARRAYS or len(arrays) != len(taken):
        raise ValueError(f"put_rows takes 1 to {MOST_ARRAYS} arrays and as many numbers, not {len(arrays)}.")
    lines = len(arrays[0])
    for k, (array, words) in enumerate(zip(arrays, taken, strict=True)):
        if array.element_size() != 4 or array.device != arrays[0].device:
            raise TypeError(f"array {k} is {array.dtype} on {array.device}: need 4 bytes, on {arrays[0].device}.")
        width = array[:1].numel() if lines else words
        if len(array) != lines or not array.is_contiguous() or array.data_ptr() % 16:
            raise ValueError(f"array {k} must be contiguous, hold {lines} lines and begin at a multiple of 16 bytes.")
        if not 0 <= words <= width or (width % 4 and words not in (0, width)):
            raise ValueError(f"of array {k}, with {width} words a line, {words} are to be taken: all, or of 4n some.")
    if offset and (arrays[0].dtype != torch.int32 or (lines and arrays[0][:1].numel() % 4 == 0)):
        raise ValueError(f"an offset is for lines of int32, and not of a multiple of 4: not {list(arrays[0].shape)}.")
    if count.shape != (1,) or count.dtype != torch.int64:
        raise ValueError(f"count must be [1] int64, not {list(count.shape)} {count.dtype}.")
    if destinations.dim() != 2 or destinations.shape[1] != len(arrays) or destinations.dtype != torch.int64:
        raise ValueError(f"destinations must be [ranks, {len(arrays)}] int64, not {list(destinations.shape)}.")
    if gate is not None:
        width, end = arrays[-1][:1].numel() if lines else 0, gate_column + gate.shape[-1]
        if gate.dim() != 2 or len(gate) != lines or (lines and (width % 4 or gate_column < 0 or end > width)):
            raise ValueError(f"gate {list(gate.shape)} at column {gate_column} does not fit lines of {width} words.")
    if arrays[0].device.type != "cpu" and not kernels_serve(arrays[0]):
        raise RuntimeError(
            f"Only our CUDA kernels follow addresses on {arrays[0].device}, and they are switched off: unset "
            "NS_MULTIGPU_OPS=reference, or use --pipeline.transport collective."
        )
    torch.ops.ns_multigpu.put_rows(
        [array.detach() for array in arrays], list(taken), count, destinations, gate, gate_column, offset
    )


LIBRARY.impl("put_rows", composed.put_rows, "CPU")
