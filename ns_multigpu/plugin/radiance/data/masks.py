"""Sharded masks: each rank holds its images' masks and finds the n-th pixel that a mask keeps.

Samplers draw pixel numbers among the kept pixels, whose counts all ranks have. No rank needs other ranks' masks, and no
draw is rejected.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.image_store import ImageShape

_BLOCK = 64
"""Pixels per count: the search for a pixel is within one such block."""


class Masks:
    """Masks of this rank's images, one byte per pixel. Call `put` for each, then `count`, on every rank.

    Args:
        shapes: of all images. own: indices of this rank's images. place: the device that holds the masks.

    Attributes:
        counts: [V] int64, on the host: number of kept pixels of each image, the same on every rank.
    """

    def __init__(self, shapes: Sequence[ImageShape], own: Sequence[int], place: torch.device | str) -> None:
        self._shapes, self._own = shapes, list(own)
        self._bounds = [0]  # of this rank's images, in blocks
        for index in self._own:
            self._bounds.append(self._bounds[-1] + -(-shapes[index].height * shapes[index].width // _BLOCK))
        firsts = torch.zeros(len(shapes), dtype=torch.int64)
        firsts[self._own] = torch.tensor(self._bounds[:-1], dtype=torch.int64)
        self._firsts = firsts.to(place)  # first block of each image
        self._pixels = torch.zeros(self._bounds[-1], _BLOCK, dtype=torch.bool, device=place)
        self._before = torch.zeros(1, dtype=torch.int64, device=place)
        self.counts = torch.zeros(len(shapes), dtype=torch.int64)

    def put(self, index: int, mask: Tensor) -> None:
        """Store the mask [H, W, 1] of one of this rank's images. Thread-safe.

        Raises:
            ValueError: its size is not the image's.
        """
        shape, first = self._shapes[index], int(self._firsts[index])
        if mask.shape != (shape.height, shape.width, 1):
            raise ValueError(f"the mask has {list(mask.shape)} values, expected were {[shape.height, shape.width, 1]}")
        self._flat(first, mask.numel()).copy_(mask.reshape(-1))

    def count(self, world: World) -> None:
        """Count kept pixels and all-gather the counts. Every rank calls it after all `put` calls."""
        ends = self._pixels.sum(1).cumsum(0)
        self._before = torch.cat([ends.new_zeros(1), ends])
        at_ends = self._before[torch.tensor(self._bounds, device=ends.device)].cpu()
        mine = torch.zeros_like(self.counts)
        mine[self._own] = at_ends.diff()
        self.counts = torch.tensor(all_gather_ints(mine.tolist(), world), dtype=torch.int64).sum(0)

    def nth(self, indices: Tensor, numbers: Tensor) -> Tensor:
        """Return [K] row * width + column of kept pixels, by their numbers within their images.

        Args:
            indices: [K] images of this rank. numbers: [K] from 0, each below its image's count.
        """
        place = self._pixels.device
        indices, numbers = indices.to(place), numbers.to(place)
        firsts = self._firsts[indices]
        target = self._before[firsts] + numbers
        block = torch.searchsorted(self._before, target, right=True) - 1
        within = self._pixels[block].cumsum(1) > (target - self._before[block])[:, None]
        return (block - firsts) * _BLOCK + within.int().argmax(1)

    def values(self, indices: Tensor, at: Tensor) -> Tensor:
        """Return [K] bool, True if the mask keeps the pixel.

        Args:
            indices: [K] images of this rank. at: [K] row * width + column.
        """
        place = self._pixels.device
        return self._pixels.view(-1)[self._firsts[indices.to(place)] * _BLOCK + at.to(place)]

    def whole(self, index: int) -> Tensor:
        """Return the mask [H, W, 1] of one of this rank's images, on the masks' device."""
        shape = self._shapes[index]
        flat = self._flat(int(self._firsts[index]), shape.height * shape.width)
        return flat.view(shape.height, shape.width, 1)

    def _flat(self, block: int, pixels: int) -> Tensor:
        return self._pixels.view(-1)[block * _BLOCK :][:pixels]
