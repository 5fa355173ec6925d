"""All training images on every rank's GPU, where they fit: a step then waits for no copy and no other rank."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_ints
from ns_multigpu.core.image_part import ImagePart
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.types import View
from ns_multigpu.core.world import World
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager

_SHARE = 0.1
"""The part of a GPU's memory that images may take."""


class DeviceImages:
    """The images of a batch's views on the ranks that render them.

    They are kept on every GPU if all of them take at most a tenth of its memory; otherwise each step has them brought
    from the ranks that hold them. Every rank makes one and calls it with the same views.

    Args:
        data: holds each rank's share of the images.
        world: the ranks.
    """

    def __init__(self, data: DistributedDataManager, world: World) -> None:
        self._data, self._world = data, world
        self._kept: dict[int, Tensor] = {}
        self._smaller: dict[int, Tensor] = {}
        self._factor = 1
        total = sum(shape.nbytes for shape in data.train_share.shapes)
        memory = 0
        if world.device.type == "cuda":
            memory = torch.cuda.get_device_properties(world.device).total_memory
        # The ranks' GPUs may differ, and fetching takes all ranks: the smallest decides.
        if total <= _SHARE * min(row[0] for row in all_gather_ints([memory], world)):
            for index in range(len(data.train_share.shapes)):
                self._kept[index] = data.train_share.fetch(index, world.device)["image"]

    def get(self, indices: list[int], plan: Plan, views: Sequence[View]) -> list[ImagePart]:
        """What this rank's patches show of their images [H, W, 3], in the order of the patches; see
        `ImageShare.deliver`. Where no rank needs an image that another one holds, nobody waits for the others.

        Args:
            indices: the batch's views by their number in the capture.
            plan: whose pixels are whose.
            views: the batch's.
        """
        mine = plan.owned[self._world.rank]
        self._smaller = {}
        if self._kept:
            return [ImagePart.whole({"image": self._kept[indices[patch.view]]}) for patch in mine]
        there = self._data.train_share.deliver(indices, plan, self._world.device, views)
        return [there[patch] for patch in mine]

    def get_smaller(
        self,
        indices: list[int],
        plan: Plan,
        views: Sequence[View],
        factor: int,
        shrink: Callable[[Tensor], Tensor],
    ) -> list[ImagePart]:
        """The same at a lower resolution, then whole images [H / factor, W / factor, 3]. Every rank calls it alike.

        Where all images are on the GPU each is made smaller once, and kept until another `factor`, or full resolution,
        is asked for: as bytes become floats, half the resolution takes as much memory as the images do.

        Args:
            factor: 1 for the images as they are.
            shrink: makes an image so much smaller; it depends on the image alone.
        """
        if factor == 1:
            return self.get(indices, plan, views)
        if not self._kept:
            return [ImagePart.whole({"image": shrink(part.data["image"])}) for part in self.get(indices, plan, views)]
        if factor != self._factor:
            self._smaller, self._factor = {}, factor
        found: list[ImagePart] = []
        for patch in plan.owned[self._world.rank]:
            index = indices[patch.view]
            if index not in self._smaller:
                self._smaller[index] = shrink(self._kept[index])
            found.append(ImagePart.whole({"image": self._smaller[index]}))
        return found
