"""Emulation of peer memory for ranks on a CPU: files that all of them map."""

import math
from pathlib import Path

import torch
import torch.distributed as dist

from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World


class SharedFile:
    """In the place of `PeerBuffer`, whose arguments and methods it has. Set `folder` before one is made."""

    folder = Path()
    made = 0

    def __init__(self, size: int, world: World, *, machine: bool = False) -> None:
        assert len({*all_gather_objects(size, world)}) == 1
        self._size, self._group = size, world.local_group if machine else world.group
        self._name = f"{SharedFile.made}-{world.machine if machine else 'all'}"
        SharedFile.made += 1

    def view(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        path = str(self.folder / f"{self._name}-{rank}")
        whole = torch.from_file(path, shared=True, size=self._size, dtype=torch.uint8)
        count = math.prod(shape) * dtype.itemsize
        assert offset + count <= self._size
        return whole[offset : offset + count].view(dtype).view(*shape)

    def barrier(self, channel: int = 0) -> None:
        dist.barrier(group=self._group)
