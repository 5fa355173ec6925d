"""Asynchronous upload of small tables of numbers to a device."""

from collections.abc import Sequence

import torch
from torch import Tensor


class ScalarRing:
    """Ring of pinned buffers that uploads small tables of numbers to a device without waiting for it.

    The device copies from pinned memory when its stream gets there; until then the host must not write to the buffer.
    So there are several slots, each with an event that marks the end of its copy. The host waits only if it is as many
    uploads ahead as there are slots.

    Args:
        device: where to; on a CPU there is nothing to carry.
        width: numbers a line.
        slots: uploads that may be under way.
        what: the numbers' name in errors.
    """

    def __init__(self, device: torch.device, width: int, slots: int = 8, what: str = "A step's numbers") -> None:
        self._device, self._width, self._slots, self._what = device, width, slots, what
        self._lines = 0
        self._next = 0

    def _grow(self, lines: int, dtype: torch.dtype) -> None:
        self._lines, self._dtype = 1 << (lines - 1).bit_length(), dtype
        shape = (self._slots, self._lines, self._width)
        # The old ones may be in use yet: torch's allocators keep their memory until the device is past it.
        self._host = torch.empty(shape, dtype=dtype, pin_memory=True)
        self._there = torch.empty(shape, dtype=dtype, device=self._device)
        self._done = [torch.cuda.Event() for _ in range(self._slots)]

    def upload(
        self, lines: Sequence[Sequence[float]] | Tensor, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """Return the lines as a tensor [n, width] on the device, or in `into`; valid until as many uploads as there are
        slots have followed. All uploads of a ring are made, and their results used, on one stream.

        Raises:
            RuntimeError: the stream is being captured: the graph would repeat today's numbers for ever.
        """
        table = torch.as_tensor(lines, dtype=dtype).reshape(len(lines), self._width)
        if self._device.type != "cuda":
            return table if into is None else into.copy_(table)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self._what} cannot be uploaded within a CUDA graph, which would repeat today's numbers for ever: "
                "upload them before it."
            )
        if len(lines) > self._lines or dtype != self._dtype:
            self._grow(len(lines), dtype)
        slot, self._next = self._next, (self._next + 1) % self._slots
        self._done[slot].synchronize()  # returns at once for an event that was never recorded
        host = self._host[slot, : len(lines)]
        host.copy_(table)
        there = self._there[slot, : len(lines)] if into is None else into
        there.copy_(host, non_blocking=True)
        self._done[slot].record(torch.cuda.current_stream(self._device))
        return there
