"""`partition.png` in the run folder: which rank owns what, and where training views are at home."""

from pathlib import Path

import numpy as np
import torch
from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_rows
from ns_multigpu.core.schema import POSITION
from ns_multigpu.core.world import World
from ns_multigpu.locality.picture import MOST_POINTS, Partition, draw
from ns_multigpu.plugin.model.splat_model import SplatModel

FILE = "partition.png"


class PartitionPicture:
    """Draws the partition at the start and whenever points have been placed anew. Made on every rank.

    Args:
        model: whose points are spread; nothing is drawn of one whose points are not.
        cameras: [V, 3, 4] the training views' poses (camera to world).
        world: the ranks. folder: the run's.
    """

    def __init__(self, model: SplatModel, cameras: Tensor, world: World, folder: Path) -> None:
        self._model, self._cameras, self._world, self._folder = model, cameras, world, folder
        self._drawn: int | None = None

    @property
    def due(self) -> bool:
        """Whether the partition is another than that of the last picture; the same on every rank."""
        holding = self._model.holding
        if self._world.size == 1 or not self._model.sharded or holding is None:
            return False
        return holding.placement.placings != self._drawn

    @torch.no_grad()
    def draw(self) -> None:
        """Draws it, on rank 0, from a sample of everybody's points, and says what was not placed as asked. Every rank
        calls it. A disk that takes nothing does not end a run for a picture's sake."""
        model, world = self._model, self._world
        assert model.holding is not None and model.shard_counts is not None
        self._drawn = model.holding.placement.placings
        stride = -(-model.total_points // MOST_POINTS)
        mine = model.gauss_params[POSITION].detach()[::stride].float().contiguous()
        sample, counts = all_gather_rows(mine, world)
        if not world.is_main:
            return
        for remark in model.holding.placement.remarks():
            CONSOLE.print(remark, soft_wrap=True)
        homes = np.array(model.holding.placement.homes_of_views, dtype=np.int64)
        if len(homes) != len(self._cameras):  # a placement that was saved, of a capture that had other views
            homes = homes[:0]
        picture = Partition(
            positions=sample.cpu().double().numpy(),
            owners=np.repeat(np.arange(world.size), counts),
            points=model.shard_counts,
            cameras=self._cameras[:, :3, 3].cpu().double().numpy(),
            homes=homes,
            machines=world.machines,
        )
        file = self._folder / FILE
        try:
            draw(picture).save(file)
        except OSError as error:
            CONSOLE.print(Text(f"{file} cannot be written: {error}. Training goes on.", "bold yellow"), soft_wrap=True)
        else:
            CONSOLE.print(f"Who owns which points is shown in {file}.", soft_wrap=True)
