"""All training images on every rank's GPU, where they fit: a step then waits for no copy and no other rank."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ns_multigpu.core.assign.image_part import ImagePart
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager

_SHARE = 0.1
"""The part of a GPU's memory that images may take."""
_WHOLE = 0.025
"""The part of a GPU's memory that whole images may take beside those that are shown. They are bytes, so that whole and
smaller ones take no more than twice as much; to bring them again takes all ranks, and a host that copies."""
_AT_ONCE = 64 << 20
"""Bytes of images that ranks send each other in one message. One for each image is hundreds, which are waited for."""


class DeviceImages:
    """The images of a batch's views on the ranks that render them.

    They are kept on every GPU if all of them take at most a tenth of its memory; otherwise each step has them brought
    from the ranks that hold them. What is kept has the resolution that training is at: as bytes become floats, images
    at half the resolution take as much memory as whole ones, and both are never there at once. Every rank makes one
    and calls it with the same views and factors.

    Args:
        data: holds each rank's share of the images, which are of one size.
        world: the ranks.

    Attributes:
        kept: [V, H, W, 3] all images as they were brought last, where they are kept; None before, and elsewhere.
    """

    def __init__(self, data: DistributedDataManager, world: World) -> None:
        self._share, self._world = data.train_share, world
        self.kept: Tensor | None = None
        self._factor = 0
        """By what the images in `kept` were made smaller; 0 before there are any."""
        self._originals: Tensor | None = None
        """Whole images, where bringing them again would take long or they take little room."""
        total = sum(shape.nbytes for shape in self._share.shapes)
        memory = 0
        if world.device.type == "cuda":
            memory = torch.cuda.get_device_properties(world.device).total_memory
        # The ranks' GPUs may differ, and fetching takes all ranks: the smallest decides, and one that has to decode
        # images again and again.
        rows = all_gather_ints([memory, int(self._share.store.complete)], world)
        self._fits = total <= _SHARE * min(row[0] for row in rows)
        self._again = all(row[1] for row in rows) and total > _WHOLE * min(row[0] for row in rows)

    def get(self, indices: list[int], plan: Plan, views: Sequence[View]) -> list[ImagePart]:
        """What this rank's patches show of their images [H, W, 3], in the order of the patches; see
        `ImageShare.deliver`. Where no rank needs an image that another one holds, nobody waits for the others.

        Args:
            indices: the batch's views by their number in the capture.
            plan: whose pixels are whose.
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
        """The same at a lower resolution, then whole images [H / factor, W / factor, 3]. Every rank calls it alike.

        Where images are kept on the GPU, all are made smaller at the first call with a `factor`, and those of another
        one are let go.

        Args:
            factor: 1 for the images as they are.
            shrink: makes an image so much smaller; it depends on the image alone.
        """
        mine = plan.owned[self._world.rank]
        if self._fits:
            self.bring(factor, shrink)
            assert self.kept is not None, "brought"
            return [ImagePart.whole({"image": self.kept[indices[patch.view]]}) for patch in mine]
        there = self._share.deliver(indices, plan, self._world.device, views)
        parts = [there[patch] for patch in mine]
        if factor == 1:
            return parts
        return [ImagePart.whole({"image": shrink(part.data["image"])}) for part in parts]

    def bring(self, factor: int, shrink: Callable[[Tensor], Tensor]) -> None:
        """Has all images here at a resolution, where they are kept. As `get_smaller`, every rank calls it alike."""
        if not self._fits or factor == self._factor:
            return
        self.kept, self._factor = None, factor
        whole = self._originals
        if whole is None and (factor == 1 or not self._again):
            whole = _together(self._brought(), self._count)
            self._originals = None if self._again else whole
        if factor == 1:
            self.kept = whole
            return
        self.kept = _together(map(shrink, self._brought() if whole is None else whole), self._count)

    @property
    def _count(self) -> int:
        return len(self._share.shapes)

    def _brought(self) -> Iterator[Tensor]:
        """All whole images, in order, as they come from the ranks that hold them."""
        for indices in self._parts():
            yield from (data["image"] for data in self._share.fetch_all(indices, self._world.device))

    def _parts(self) -> list[list[int]]:
        """All images, in parts that are brought at once."""
        parts, room = list[list[int]](), 0
        for index, shape in enumerate(self._share.shapes):
            if shape.nbytes > room:
                parts.append([])
                room = _AT_ONCE
            parts[-1].append(index)
            room -= shape.nbytes
        return parts


def _together(images: Iterable[Tensor], count: int) -> Tensor:
    """So many images of one size in one tensor, each put there as it comes."""
    whole: Tensor | None = None
    for index, image in enumerate(images):
        if whole is None:
            whole = image.new_empty(count, *image.shape)
        whole[index] = image
    assert whole is not None, "a capture has views"
    return whole
