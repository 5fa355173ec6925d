"""Ranks of one process, whose single host thread enqueues the work of all devices.

A rank has a `World` without process groups. It writes into the other ranks' memory (`PeerBuffer`), as processes with
peer memory do. The host runs the ranks in lockstep, part by part (`exchange.transport.launched_together`). Between two
parts the devices wait for each other by events. No kernel waits for work that the host has not enqueued yet.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ns_multigpu.core.dist.world import World


class Members:
    """All ranks of one process.

    Args:
        devices: of each rank: different GPUs, each with access to the memory of all others, or the CPU.

    Attributes:
        worlds: by rank.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        size = len(devices)
        self.worlds = [World(rank, size, rank, size, device, members=self) for rank, device in enumerate(devices)]
        self._buffers: list[deque[list[Tensor]]] = [deque() for _ in devices]
        self._gathered: list[tuple[Tensor, Tensor]] = []
        self._events = [torch.cuda.Event() for device in devices if device.type == "cuda" and size > 1]

    def on(self, rank: int) -> AbstractContextManager[object]:
        """Return a context in which the rank's GPU is the current one."""
        device = self.worlds[rank].device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def meet(self) -> None:
        """Make the current stream of each GPU wait for those of all others; the host goes on."""
        streams = [torch.cuda.current_stream(world.device) for world in self.worlds] if self._events else []
        for event, stream in zip(self._events, streams, strict=True):
            event.record(stream)
        for rank, stream in enumerate(streams):
            for other, event in enumerate(self._events):
                if other != rank:
                    stream.wait_event(event)

    def buffers(self, rank: int, size: int) -> list[Tensor]:
        """Return a buffer of each rank on its device, [size] uint8. The first rank that asks allocates those of all;
        the others get the same ones, in the order of their calls.

        Raises:
            ValueError: the ranks ask for different sizes.
        """
        if not self._buffers[rank]:
            made = [torch.empty(size, dtype=torch.uint8, device=world.device) for world in self.worlds]
            for other, waiting in enumerate(self._buffers):
                if other != rank:
                    waiting.append(made)
        else:
            made = self._buffers[rank].popleft()
        if len(made[0]) != size:
            raise ValueError(f"rank {rank} asks for {size} bytes of peer memory, another rank for {len(made[0])}.")
        return made

    def gather(self, out: Tensor, x: Tensor) -> None:
        """Copy every rank's `x` into every rank's `out` [ranks, ...], once the last rank has called it."""
        self._gathered.append((out, x))
        if len(self._gathered) < len(self.worlds):
            return
        for into, _ in self._gathered:
            for line, (_, own) in zip(into, self._gathered, strict=True):
                line.copy_(own, non_blocking=True)
        self._gathered.clear()
