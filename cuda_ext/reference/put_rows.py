"""Reference in torch's operators of `put_rows`, for addresses of this process's own memory."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def put_rows(
    arrays: Sequence[Tensor], taken: Sequence[int], count: Tensor, destinations: Tensor, gate: Tensor | None = None,
    gate_column: int = 0, offset: int = 0,
) -> None:  # fmt: skip
    """See `cuda_ext.ops.exchange.put_rows.put_rows`."""
    lines = min(int(count), len(arrays[0]))
    if lines == 0:
        return
    words = [array[:lines].reshape(lines, -1).view(torch.int32) for array in arrays]
    words[0] = words[0] + offset
    if gate is not None:
        last = words[-1].clone()
        last[:, gate_column : gate_column + gate.shape[1]].masked_fill_(gate[:lines] <= 0, 0)
        words[-1] = last
    for places in destinations.tolist():
        for array, wanted, address in zip(words, taken, places, strict=True):
            memory = (ctypes.c_int32 * array.numel()).from_address(address)
            there = torch.frombuffer(memory, dtype=torch.int32).view(array.shape)
            there[:, :wanted] = array[:, :wanted]
