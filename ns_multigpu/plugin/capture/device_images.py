"""All training photographs on every rank's GPU, if they fit: a step then needs no copy and no communication for them.

A photograph is one tensor [h, w, channels]: colour, then its alpha and its masks where any photograph has one. Those of
different sizes are stored in the top left corners of images of the largest size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ns_multigpu.core.assign.image_part import ImagePart
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager

_SHARE = 0.1
"""Fraction of a GPU's memory that images may take."""
_WHOLE = 0.025
"""Fraction of a GPU's memory that full-size images may take next to smaller ones. They are uint8, so both together take
at most twice as much. Fetching them again is a collective with host copies.
"""
_AT_ONCE = 64 << 20
"""Bytes of images per message between ranks. One message per image would be hundreds, each with its latency."""


class DeviceImages:
    """Images of a batch's views on the ranks that render them.

    Every GPU keeps all images if they take at most a tenth of its memory. Otherwise each step fetches them from their
    owners. Kept images have the current training resolution. Smaller images are float32: at half the resolution they
    take as much memory as the uint8 originals, so only one set is kept. Every rank creates one and calls it with the
    same views and factors.

    Args:
        data: holds each rank's images.
        world: the ranks.

    Attributes:
        kept: [V, H, W, channels] all photographs as fetched last; None before the first fetch, or if they do not fit.
        alpha: whether any photograph has an alpha channel. masks: the most channels of a photograph's mask.
    """

    def __init__(self, data: DistributedDataManager, world: World) -> None:
        self._share, self._world = data.train_share, world
        self.kept: Tensor | None = None
        self._factor = 0
        """Downscale factor of the images in `kept`; 0 before there are any."""
        self._originals: Tensor | None = None
        """Full-size images, kept if fetching them again is slow or they are small."""
        shapes = self._share.shapes
        self.alpha, self.masks = any(s.channels == 4 for s in shapes), max(s.masks for s in shapes)
        numbers = max(s.height for s in shapes) * max(s.width for s in shapes) * (3 + self.alpha + self.masks)
        total = len(shapes) * numbers * shapes[0].dtype.itemsize
        memory = 0
        if world.device.type == "cuda":
            memory = torch.cuda.get_device_properties(world.device).total_memory
        # The ranks' GPUs may differ and fetching is a collective, so the smallest GPU decides. So does a rank
        # that decodes its images on demand.
        rows = all_gather_ints([memory, int(self._share.store.complete)], world)
        self._fits = total <= _SHARE * min(row[0] for row in rows)
        self._again = all(row[1] for row in rows) and total > _WHOLE * min(row[0] for row in rows)

    def get(self, indices: list[int], plan: Plan, views: Sequence[View]) -> list[ImagePart]:
        """Return this rank's patches of the photographs [H, W, channels], in the order of the patches, by the name
        `image`; see `ImageShare.deliver`.

        No communication takes place if every rank holds the images it needs.

        Args:
            indices: the batch's views by their number in the capture.
            plan: the owner of each pixel.
            views: the batch's.
        """
        return self.get_smaller(indices, plan, views, 1, lambda image: image)

    def get_smaller(
        self,
        indices: list[int],
        plan: Plan,
        views: Sequence[View],
        factor: int,
        shrink: Callable[[Tensor], Tensor],
    ) -> list[ImagePart]:
        """Return the same at a lower resolution, as complete photographs [H / factor, W / factor, channels]. Every rank
        calls it alike.

        If images are kept on the GPU, the first call with a `factor` scales all of them and frees those of another
        factor.

        Args:
            factor: 1 for the original resolution.
            shrink: scales one image down by `factor`; it depends on the image alone.
        """
        mine = plan.owned[self._world.rank]
        if self._fits:
            self.load(factor, shrink)
            assert self.kept is not None, "brought"
            return [
                ImagePart.whole({"image": self.kept[indices[p.view], : views[p.view].height, : views[p.view].width]})
                for p in mine
            ]
        there = self._share.deliver(indices, plan, self._world.device, views)
        parts = [replace(there[patch], data={"image": self._layered(there[patch].data)}) for patch in mine]
        if factor == 1:
            return parts
        return [ImagePart.whole({"image": shrink(part.data["image"])}) for part in parts]

    def load(self, factor: int, shrink: Callable[[Tensor], Tensor]) -> None:
        """Fetch all images at a resolution, if they are kept on the GPU. Every rank calls it alike."""
        if not self._fits or factor == self._factor:
            return
        self.kept, self._factor = None, factor
        whole = self._originals
        if whole is None and (factor == 1 or not self._again):
            whole = self._together(self._brought(), 1)
            self._originals = None if self._again else whole
        if factor == 1:
            self.kept = whole
            return
        self.kept = self._together(map(shrink, self._brought() if whole is None else whole), factor)

    def _brought(self) -> Iterator[Tensor]:
        """Yield all full-size photographs in order, fetched from their owners."""
        for indices in self._parts():
            yield from map(self._layered, self._share.fetch_all(indices, self._world.device))

    def _layered(self, data: Mapping[str, Tensor]) -> Tensor:
        """Return [h, w, channels] for an image [h, w, 3 or 4] and its mask [h, w, 1 or 2], if there is one."""
        image = data["image"]
        if not (self.alpha or self.masks):
            return image
        full = 255 if image.dtype == torch.uint8 else 1
        layers = [image]
        if self.alpha and image.shape[2] == 3:
            layers.append(torch.full_like(image[..., :1], full))
        if self.masks:
            mask = data.get("mask")
            layers.append(torch.full_like(image[..., :1], full) if mask is None else mask.to(image.dtype) * full)
        return torch.cat(layers, dim=2)

    def _together(self, images: Iterable[Tensor], factor: int) -> Tensor:
        """Stack all photographs, at 1 / `factor` of their sizes, into one tensor, copying each as it is received."""
        shapes = self._share.shapes
        height, width = max(s.height for s in shapes) // factor, max(s.width for s in shapes) // factor
        whole: Tensor | None = None
        for index, image in enumerate(images):
            if whole is None:
                whole = image.new_zeros(len(shapes), height, width, image.shape[2])
            whole[index, : image.shape[0], : image.shape[1]] = image
        assert whole is not None, "a capture has views"
        return whole

    def _parts(self) -> list[list[int]]:
        """Return all image indices, split into groups that are fetched together."""
        parts, free = list[list[int]](), 0
        for index, shape in enumerate(self._share.shapes):
            if shape.nbytes > free:
                parts.append([])
                free = _AT_ONCE
            parts[-1].append(index)
            free -= shape.nbytes
        return parts
