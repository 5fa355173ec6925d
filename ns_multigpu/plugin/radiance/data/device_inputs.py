"""Inputs of a step (rays and colours), copied to a device without waiting for it.

The host draws the pixels, reads the colours of those that it holds, and sends both in one copy. The device adds the
colours of other ranks and computes the rays.
"""

from typing import Any

import torch
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

from ns_multigpu.core.dist.collectives import sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.radiance.data.pinhole_rays import PinholeRays
from ns_multigpu.plugin.radiance.data.split import ImageSplit

_SENDING = 4
"""Maximum number of pending copies."""


class DeviceInputs:
    """Step inputs of one rank.

    Args:
        split: images that pixels are drawn from. rays: generator of their cameras' rays. world: the ranks.
    """

    def __init__(self, split: ImageSplit, rays: PinholeRays, world: World) -> None:
        self._split, self._rays, self._world = split, rays, world
        # Colours, then `DrawnPixels.rows`.
        self._received = torch.zeros(0, dtype=torch.int32, device=world.device)
        self._rows = 0
        self._staged: list[Tensor] = []
        self._sent: list[Any] = []
        self._count = self._turn = 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key that determines the shapes of `batch`."""
        assert self._split.images is not None
        return (self._count, *self._split.images.kind)

    def send(self, step: int) -> None:
        """Draw the pixels of a step and send this rank's colours to the device. Every rank calls it in each step."""
        pixels, images = self._split.draw(step, step)
        table, rows = images.table(pixels), pixels.rows
        if self._count != len(table) or self._received.numel() != table.numel() + rows.numel():
            self._count, self._rows = len(table), len(rows)
            self._grow_capacity(table.numel() + rows.numel())
        self._turn = (self._turn + 1) % len(self._staged)
        staged = self._staged[self._turn]
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()  # returns at once: the copy was launched several steps ago
        staged[: table.numel()] = table.view(-1)
        staged[table.numel() :] = rows.view(-1)
        self._received.copy_(staged, non_blocking=True)
        if self._received.is_cuda:
            self._sent[self._turn] = torch.cuda.Event()
            self._sent[self._turn].record()

    def share(self) -> None:
        """Sum the ranks' colours. Every rank calls it after `send`; it does not wait for the device."""
        sum_in_place(self._table(), self._world)

    def batch(self) -> tuple[RayBundle, dict[str, Tensor]]:
        """Return the rays and colours of the last `share`, as `RadianceDataManager.next_train` does. Nothing is read
        back, and no shape depends on values."""
        table = self._table()
        assert self._split.images is not None
        rows = self._received[table.numel() :].view(self._rows, -1).long()
        batch = self._split.batch(rows, self._split.images.seen(table))
        return self._rays(batch["indices"]), batch

    def _table(self) -> Tensor:
        """View the colours, one row a pixel: [pixels, numbers]."""
        return self._received[: self._received.numel() - self._rows * self._count].view(self._count, -1)

    def _grow_capacity(self, numbers: int) -> None:
        device = self._world.device
        self._received = torch.zeros(numbers, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        copies = _SENDING if pinned else 1
        self._staged = [torch.zeros(numbers, dtype=torch.int32, pin_memory=pinned) for _ in range(copies)]
        self._sent = [None] * copies
