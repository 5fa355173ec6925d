"""Rays, cells and the model of one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from ns_multigpu.core.assign.placement import even_bounds
from ns_multigpu.core.dist.collectives import broadcast_object
from ns_multigpu.plugin.capture.tracks import OPTION, training_tracks
from ns_multigpu.plugin.checkpoint.verify import SHARDS
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.radiance.data.datamanager import RadianceDataManager, RadianceDataManagerConfig
from ns_multigpu.plugin.radiance.field.model import NerfactoXLModel, NerfactoXLModelConfig
from ns_multigpu.plugin.radiance.run.pictures import FieldPictures
from ns_multigpu.plugin.radiance.run.saved import SavedField, density_of, field_in, read_parameters
from ns_multigpu.plugin.radiance.run.team_plan import plan_for_field
from ns_multigpu.plugin.render import team
from ns_multigpu.plugin.render.partition_picture import MOST_POINTS, save
from ns_multigpu.plugin.render.partition_picture import PictureContent as Picture
from ns_multigpu.plugin.render.service import RenderService
from ns_multigpu.plugin.run.pipeline import RunPipeline, RunPipelineConfig
from ns_multigpu.radiance.partition import Partition, few_views, partition

_DEPTH_WEIGHT = 0.01
"""Weight of the depth loss that "auto" gives: gsplat's."""


@dataclass
class RadiancePipelineConfig(RunPipelineConfig):
    """The pipeline configuration of `nerfacto-xl`."""

    _target: type = field(default_factory=lambda: RadiancePipeline)
    datamanager: RadianceDataManagerConfig = field(default_factory=RadianceDataManagerConfig)
    model: NerfactoXLModelConfig = field(default_factory=NerfactoXLModelConfig)

    def team_plan(self, state: Mapping[str, Any], checkpoint: Path, devices: team.Devices) -> team.TeamPlan:
        """See `RunPipelineConfig.team_plan`."""
        return plan_for_field(state, checkpoint, devices)

    def most_ranks(self, state: Mapping[str, Any], checkpoint: Path) -> int:
        """See `RunPipelineConfig.most_ranks`: each rank has at least one cell."""
        cells = dict(state.get(SHARDS, {})).get("cells")
        if not isinstance(cells, int):
            raise InputError(f"{checkpoint} is not a checkpoint of a radiance field of ours: it has no cells.")
        return cells

    def memory_remedies(self, on_gpu: bool) -> Sequence[str]:
        """See `RunPipelineConfig.memory_remedies`."""
        rays, entries = self.datamanager.train_num_rays_per_batch, self.model.log2_hashmap_size
        return [
            "more GPUs, each with fewer cells",
            f"fewer rays: --pipeline.datamanager.train-num-rays-per-batch {rays // 2}",
            f"smaller grids: --pipeline.model.log2-hashmap-size {entries - 1}",
            "in evaluation, fewer rays at once: --pipeline.model.eval-num-rays-per-chunk",
        ]


class RadiancePipeline(RunPipeline):
    """Datamanager and model of one rank.

    Raises:
        InputError: there are fewer cells than ranks.
    """

    config: RadiancePipelineConfig
    datamanager: RadianceDataManager

    def begin(self, config: RadiancePipelineConfig, test_mode: str) -> None:
        """See `RunPipeline.begin`."""
        del test_mode
        self.cut_by: Tensor | None = None  # points [N, 3] that determined the partition
        # A resumed run draws the same as an uninterrupted one, images included.
        self._begun = None if config.resumed_from is None or not self.trains else field_in(config.resumed_from)
        seed = broadcast_object(torch.initial_seed(), 0, self.world) if self._begun is None else self._begun.seed
        torch.manual_seed(seed)

    def complete(self) -> None:
        """See `RunPipeline.complete`."""
        begun = self._begun
        if self.trains:
            self._observe()
            self.place(self.new_cells() if begun is None else self._checked(begun), begun)
        self.renders = RenderService(self.model, FieldPictures(self.model), self.world)

    def _observe(self) -> None:
        """Draw a share of the rays at COLMAP's points, if their depths are learned.

        Raises:
            InputError: the capture has none, or cameras that they cannot be projected into, and a weight was given.
        """
        asked = self.config.model.depth_loss
        if asked == 0:
            return
        try:
            self.datamanager.observe(training_tracks(self.datamanager, self.world))
        except InputError:
            if asked != "auto":
                raise
            CONSOLE.print(f"Depth loss: none. COLMAP's points cannot be used here; {OPTION} 0.01 names the reason.")
        else:
            self.model.depth_weight = _DEPTH_WEIGHT if asked == "auto" else asked

    @property
    def images_per_step(self) -> float:
        """See `RunPipeline.images_per_step`."""
        cameras = self.datamanager.train_dataset.cameras
        pixels = float((cameras.width.double() * cameras.height.double()).mean())
        return self.config.datamanager.train_num_rays_per_batch / pixels

    @property
    def described(self) -> str:
        """See `RunPipeline.described`."""
        cells = self.model.partition
        return "no cells yet" if cells is None else f"{cells.cells} cells"

    @property
    def memory_facts(self) -> Sequence[str]:
        """See `RunPipeline.memory_facts`."""
        rays = self.config.datamanager.train_num_rays_per_batch
        return [f"{len(self.model.cells)} cell(s) on this rank", f"{rays:,} rays a step"]

    @property
    def model(self) -> NerfactoXLModel:
        """The model."""
        assert isinstance(self._model, NerfactoXLModel)
        return self._model

    def _checked(self, begun: SavedField) -> Partition:
        """Return the cells of the checkpoint to resume, checked against the options and the number of workers."""
        checkpoint, asked, ranks = self.config.resumed_from, self.config.model.cells, self.world.size
        cells = begun.partition
        if cells.cells < ranks:
            raise InputError(
                f"{checkpoint} has {cells.cells} cells, and each of the {ranks} workers wants one at least. Use "
                f"{cells.cells} workers or fewer. To have more, train with more cells from the start "
                "(--pipeline.model.cells)."
            )
        if asked not in (0, cells.cells):
            raise InputError(
                f"--pipeline.model.cells {asked}: {checkpoint} has {cells.cells}, and a run keeps its cells. Leave the "
                "option out."
            )
        return cells

    def place(self, cells: Partition, saved: SavedField | None) -> None:
        """Create this rank's fields.

        Args:
            cells: of space. saved: the checkpoint of these cells; None if they are new.
        """
        self.model.place(cells, self.world)

    def points_to_cut(self) -> Tensor | None:
        """Return the points [N, 3] that determine the partition; None if the capture has none."""
        seeds = self.model.kwargs["seed_points"]
        return None if seeds is None or not len(seeds[0]) else seeds[0]

    def new_cells(self) -> Partition:
        """Partition space into cells, the same on all ranks."""
        config, world, model = self.config.model, self.world, self.model
        count = config.cells or world.size
        if count < world.size:
            raise InputError(
                f"--pipeline.model.cells {count}: each of the {world.size} workers wants a cell at least. Give "
                f"{world.size} or more, or 0."
            )
        points = self.points_to_cut()
        if points is None:
            points = self.datamanager.points_along_rays(config.near_plane, config.far_plane)
            if count > 1:
                CONSOLE.print(
                    "The capture has no reconstructed points: space is cut into cells by samples along training rays.",
                    soft_wrap=True,
                )
        # Rank 0's result for all, although all have read the same points.
        cells: Partition = broadcast_object(partition(points, count, model.domain), 0, world)
        self.cut_by = None if model.way.replicated else points[model.domain.holds(points)]
        if self.cut_by is not None and (empty := count - len(cells.of(self.cut_by).unique())):
            CONSOLE.print(
                f"[yellow]{empty} of {count} cells have none of the {len(points):,} points that space is cut by: fewer "
                "cells would do.[/yellow]",
                soft_wrap=True,
            )
        if config.spread == "xl" and (text := few_views(model.num_train_data, count)):
            CONSOLE.print(f"[yellow]{text}[/yellow]", soft_wrap=True)
        return cells

    def partition_picture(self, folder: Path) -> None:
        """Draw the rank that owns each part of space, by the points of the partition; nothing after a resume."""
        if self.cut_by is None or self.model.partition is None:
            return
        points, cameras = (self.model.domain.inward(x.double()) for x in (self.cut_by, self.camera_centres()))
        points = points[:: -(-len(points) // MOST_POINTS)] if len(points) else points
        owners = torch.bucketize(
            self.model.partition.tree.of(points),
            torch.tensor(even_bounds(self.model.partition.cells, self.world.size)[1:]),
            right=True,
        )
        counts = torch.bincount(owners, minlength=self.world.size).tolist()
        none = np.zeros(0, dtype=np.int64)
        save(Picture(points.numpy(), owners.numpy(), counts, cameras.numpy(), none, self.world.machines), folder)

    def camera_centres(self) -> Tensor:
        """Return the positions of the training cameras, [V, 3] on the host."""
        return self.datamanager.train_dataset.cameras.camera_to_worlds[:, :3, 3].cpu()

    def saved_field(self) -> SavedField:
        """Return the model's part of a .ckpt: shared parameters and the cells."""
        assert self.model.partition is not None
        shared = {name: p.detach() for name, p in self.model.shared_parameters().items()}
        return SavedField(self.model.partition, shared, self.model.seed, self.config.model.spread)

    def load_own(self, loaded_state: dict[str, Any], step: int) -> None:
        """See `RunPipeline.load_own`: loads the shared parameters and those of this rank's cells."""
        saved = SavedField.from_state(loaded_state)
        own = {"spread": self.config.model.spread, "density": density_of(self.model.shared_parameters())}
        for option, of_this in own.items():
            if (saved_as := getattr(saved, option)) != of_this:
                raise InputError(
                    f"The checkpoint is of a run with --pipeline.model.{option} {saved_as}, and this has {of_this}. "
                    f"Give {saved_as}."
                )
        if saved.partition.cells < self.world.size:
            raise InputError(
                f"The checkpoint has {saved.partition.cells} cells, and each of the {self.world.size} workers wants "
                f"one at least. Use {saved.partition.cells} workers or fewer."
            )
        if self.model.partition is None or self.model.partition.tree != saved.partition.tree:
            self.place(saved.partition, saved)
        assert self.config.checkpoints is not None
        read_parameters(self.model, saved, loaded_state, self.config.checkpoints)
        self.model.begin_step(step)
