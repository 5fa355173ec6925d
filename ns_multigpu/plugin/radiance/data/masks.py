"""Masks over all ranks: each has those of its images, and finds the n-th pixel that may be looked at in one of them.

So what is drawn are numbers of such pixels, of which all ranks know how many there are; no rank has to know where they
are to draw among them, and nothing is drawn in vain.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.image_store import ImageShape

_BLOCK = 64
"""Pixels that are counted together: a pixel is looked for in one such block."""


class Masks:
    """The masks of the images that this rank holds, a byte a pixel. `put` each, then `count`, on every rank.

    Args:
        shapes: of all images. own: those of which this rank holds the masks. place: the device that holds them.

    Attributes:
        counts: [V] int64, on the host: how many pixels of each image may be looked at, the same on every rank.
    """

    def __init__(self, shapes: Sequence[ImageShape], own: Sequence[int], place: torch.device | str) -> None:
        self._shapes, self._own = shapes, list(own)
        self._bounds = [0]  # of this rank's images, in blocks
        for index in self._own:
            self._bounds.append(self._bounds[-1] + -(-shapes[index].height * shapes[index].width // _BLOCK))
        firsts = torch.zeros(len(shapes), dtype=torch.int64)
        firsts[self._own] = torch.tensor(self._bounds[:-1], dtype=torch.int64)
        self._firsts = firsts.to(place)  # by image, its first block
        self._pixels = torch.zeros(self._bounds[-1], _BLOCK, dtype=torch.bool, device=place)
        self._before = torch.zeros(1, dtype=torch.int64, device=place)
        self.counts = torch.zeros(len(shapes), dtype=torch.int64)

    def put(self, index: int, mask: Tensor) -> None:
        """Keeps the mask [H, W, 1] of an image of this rank; from several threads at once, if need be.

        Raises:
            ValueError: it has not the image's size.
        """
        shape, first = self._shapes[index], int(self._firsts[index])
        if mask.shape != (shape.height, shape.width, 1):
            raise ValueError(f"the mask has {list(mask.shape)} values, expected were {[shape.height, shape.width, 1]}")
        self._flat(first, mask.numel()).copy_(mask.reshape(-1))

    def count(self, world: World) -> None:
        """Counts, and tells the others. Every rank calls it, when all masks have been put."""
        ends = self._pixels.sum(1).cumsum(0)
        self._before = torch.cat([ends.new_zeros(1), ends])
        at_ends = self._before[torch.tensor(self._bounds, device=ends.device)].cpu()
        mine = torch.zeros_like(self.counts)
        mine[self._own] = at_ends.diff()
        self.counts = torch.tensor(all_gather_ints(mine.tolist(), world), dtype=torch.int64).sum(0)

    def nth(self, indices: Tensor, numbers: Tensor) -> Tensor:
        """[K] row * width + column of pixels that may be looked at, by their numbers within their images.

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
        """[K] bool: whether pixels may be looked at.

        Args:
            indices: [K] images of this rank. at: [K] row * width + column.
        """
        place = self._pixels.device
        return self._pixels.view(-1)[self._firsts[indices.to(place)] * _BLOCK + at.to(place)]

    def whole(self, index: int) -> Tensor:
        """The mask [H, W, 1] of an image of this rank, where it is kept."""
        shape = self._shapes[index]
        flat = self._flat(int(self._firsts[index]), shape.height * shape.width)
        return flat.view(shape.height, shape.width, 1)

    def _flat(self, block: int, pixels: int) -> Tensor:
        return self._pixels.view(-1)[block * _BLOCK :][:pixels]
