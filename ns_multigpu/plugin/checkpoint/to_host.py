"""Tensors brought from a GPU to the host's memory while other threads go on using the GPU.

CUDA copies to memory that may be paged out under a lock of its driver: no thread launches anything meanwhile. So what
is large goes in pieces, through page-locked memory and on a stream of its own. That is three times as fast, too.
"""

import torch
from torch import Tensor

_PIECE = 2 << 20
"""Bytes of a piece. 16 MiB were slower: likely they leave the processor's caches before they are copied on."""
_SMALL = 64 << 10
"""Bytes that CUDA takes at once, wherever they go."""


def to_host(value: Tensor) -> Tensor:
    """A copy in the host's memory, which shares nothing with `value`; of its shape and type, contiguous.

    What the current stream has been given before is in it. The host waits for it. The GPU is the thread's from then on.
    """
    value = value.detach()
    if value.device.type != "cuda" or value.nbytes <= _SMALL:
        return value.to("cpu", copy=True, memory_format=torch.contiguous_format)
    host = torch.empty(value.shape, dtype=value.dtype)
    # A thread begins with GPU 0, another rank's: to go back to that would make a context there, half a gigabyte.
    torch.cuda.set_device(value.device)
    stream = torch.cuda.Stream(value.device)
    stream.wait_stream(torch.cuda.current_stream(value.device))
    with torch.cuda.stream(stream):
        _bring(value.contiguous().reshape(-1).view(torch.uint8), host.reshape(-1).view(torch.uint8))
    return host


def _bring(source: Tensor, host: Tensor) -> None:
    """Copies bytes on the current stream: one piece is on its way while the one before is copied on."""
    ways = [(torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
    starts = range(0, len(source), _PIECE)

    def send(number: int) -> None:
        if number < len(starts):
            piece = source[starts[number] :][:_PIECE]
            locked, sent = ways[number % 2]
            locked[: len(piece)].copy_(piece, non_blocking=True)
            sent.record()

    send(0)
    for number, start in enumerate(starts):
        send(number + 1)
        locked, sent = ways[number % 2]
        sent.synchronize()
        piece = host[start:][:_PIECE]
        piece.copy_(locked[: len(piece)])
