"""All training images on every rank's GPU, where they fit: a step then waits for no copy and no other rank."""

import torch
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_ints
from ns_multigpu.core.plan import Plan
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
        total = sum(shape.nbytes for shape in data.train_share.shapes)
        memory = 0
        if world.device.type == "cuda":
            memory = torch.cuda.get_device_properties(world.device).total_memory
        # The ranks' GPUs may differ, and fetching takes all ranks: the smallest decides.
        if total <= _SHARE * min(row[0] for row in all_gather_ints([memory], world)):
            for index in range(len(data.train_share.shapes)):
                self._kept[index] = data.train_share.fetch(index, world.device)["image"]

    def get(self, indices: list[int], plan: Plan) -> list[Tensor]:
        """This rank's images [H, W, 3], in the order of its patches.

        Args:
            indices: the batch's views by their number in the capture.
            plan: whose pixels are whose.
        """
        mine = [patch.view for patch in plan.owned[self._world.rank]]
        if self._kept:
            return [self._kept[indices[position]] for position in mine]
        there = self._data.train_share.deliver(indices, plan, self._world.device)
        return [there[position]["image"] for position in mine]
