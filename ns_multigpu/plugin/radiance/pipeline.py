"""Rays, cells and the model of one rank."""

from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
import torchvision.utils as vutils
from nerfstudio.pipelines.base_pipeline import VanillaPipeline, VanillaPipelineConfig
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from ns_multigpu.core.collectives import broadcast_object
from ns_multigpu.core.placement import even_bounds
from ns_multigpu.locality.picture import MOST_POINTS, draw
from ns_multigpu.locality.picture import Partition as Picture
from ns_multigpu.plugin.checkpoint.beside import BesideCheckpoints
from ns_multigpu.plugin.checkpoint.verify import read_checkpoint_file, step_of
from ns_multigpu.plugin.faults.errors import InputError, show_uncaught
from ns_multigpu.plugin.launch.process_world import get_world, set_world
from ns_multigpu.plugin.model.metrics import means
from ns_multigpu.plugin.radiance.datamanager import RadianceDataManager, RadianceDataManagerConfig
from ns_multigpu.plugin.radiance.model import NerfactoXLModel, NerfactoXLModelConfig
from ns_multigpu.plugin.radiance.renders import Renders
from ns_multigpu.plugin.radiance.saved import SavedField, field_in, read_parameters
from ns_multigpu.plugin.radiance.team_plan import plan_for_field
from ns_multigpu.plugin.render import team, viewer
from ns_multigpu.radiance.partition import Partition, few_views, partition


@dataclass
class RadiancePipelineConfig(BesideCheckpoints, VanillaPipelineConfig):
    """The pipeline of `nerfacto-xl`."""

    _target: type = field(default_factory=lambda: RadiancePipeline)
    datamanager: RadianceDataManagerConfig = field(default_factory=RadianceDataManagerConfig)
    model: NerfactoXLModelConfig = field(default_factory=NerfactoXLModelConfig)

    @property
    def cells_of(self) -> Path | None:
        """The .ckpt that a run goes on from, with its cells; no option, as `checkpoints`."""
        return vars(self).get("_cells_of")

    @cells_of.setter
    def cells_of(self, checkpoint: Path | None) -> None:
        vars(self)["_cells_of"] = checkpoint


class RadiancePipeline(VanillaPipeline):
    """Datamanager and model of one rank.

    Raises:
        InputError: there are fewer cells than ranks.
    """

    config: RadiancePipelineConfig
    datamanager: RadianceDataManager

    def __init__(
        self,
        config: RadiancePipelineConfig,
        device: str,
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        grad_scaler: Any = None,
    ) -> None:
        viewer.mend()
        self.team: team.Team | None = None
        if test_mode != "val":
            show_uncaught()
            config, self.team = team.begin(config, test_mode, plan_for_field)
        self.world = get_world(str(device))
        self.cut_by: Tensor | None = None  # points [N, 3] that space was cut by
        # A run that goes on draws what it would have drawn: from which images too.
        begun = None if config.cells_of is None or test_mode != "val" else field_in(config.cells_of)
        torch.manual_seed(broadcast_object(torch.initial_seed(), 0, self.world) if begun is None else begun.seed)
        # A world of one as far as nerfstudio knows: it would wrap the model in DDP.
        super().__init__(config, device, test_mode, world_size=1, local_rank=0, grad_scaler=grad_scaler)
        if test_mode == "val":
            self.place(self.new_cells() if begun is None else self._checked(begun), begun)
        self.renders = Renders(self.model)
        if test_mode != "val" and self.world.size == 1:
            self.renders.lead_always()
        if self.team is not None:
            set_world(None)

    @property
    def model(self) -> NerfactoXLModel:
        """The model."""
        assert isinstance(self._model, NerfactoXLModel)
        return self._model

    def _checked(self, begun: SavedField) -> Partition:
        """The cells of the checkpoint that a run goes on from, which are to fit the options and the workers."""
        checkpoint, asked, ranks = self.config.cells_of, self.config.model.cells, self.world.size
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
        """Make this rank's fields.

        Args:
            cells: of space. saved: the checkpoint that these are of; None where they are new.
        """
        self.model.place(cells, self.world)

    def points_to_cut(self) -> Tensor | None:
        """Return the points [N, 3] that space is cut by; None if the capture has none."""
        seeds = self.model.kwargs["seed_points"]
        return None if seeds is None or not len(seeds[0]) else seeds[0]

    def new_cells(self) -> Partition:
        """Cut space into cells, on all ranks the same."""
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
        # One decision for all, though all have read the same points.
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

    def partition_picture(self, file: Path) -> None:
        """Draws which rank owns which part of space, by the points that it was cut by; nothing where a run goes on.

        Raises:
            OSError: the file cannot be written.
        """
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
        seen = Picture(points.numpy(), owners.numpy(), counts, cameras.numpy(), none, self.world.machines)
        draw(seen).save(file)

    def camera_centres(self) -> Tensor:
        """Return where the training views' cameras are, [V, 3] on the host."""
        return self.datamanager.train_dataset.cameras.camera_to_worlds[:, :3, 3].cpu()

    def saved_field(self) -> SavedField:
        """What a .ckpt has of the model: all that is shared, and the cells."""
        assert self.model.partition is not None
        shared = {name: p.detach() for name, p in self.model.shared_parameters().items()}
        return SavedField(self.model.partition, shared, self.model.seed, self.config.model.spread)

    def load_pipeline(self, loaded_state: dict[str, Any], step: int) -> None:
        """Loads what a .ckpt holds, and this rank's cells from the folder that it names; helpers load theirs.

        Args:
            loaded_state: the .ckpt's pipeline.
            step: its step.

        Raises:
            InputError: they are missing, damaged, or do not fit the model.
        """
        if self.team is None:
            self._load_own(loaded_state, step)
            return
        assert self.config.checkpoints is not None, "it was looked at before there was a team"
        with CONSOLE.status("Loading cells onto all devices"):
            self.team.tell("load_file", self.config.checkpoints / f"step-{step:09d}.ckpt")
            self._load_own(loaded_state, step)
        self.renders.lead_always()

    def load_file(self, path: Path) -> None:
        """Loads a .ckpt as `load_pipeline` does. Every rank calls it.

        Raises:
            InputError: it is missing or damaged.
        """
        self._load_own(read_checkpoint_file(path)["pipeline"], step_of(path))

    def _load_own(self, loaded_state: dict[str, Any], step: int) -> None:
        saved = SavedField.from_state(loaded_state)
        if saved.spread != self.config.model.spread:
            raise InputError(
                f"The checkpoint is of a run with --pipeline.model.spread {saved.spread}, and this has "
                f"{self.config.model.spread}. Give {saved.spread}."
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

    # ---- evaluation: every rank renders, rank 0 has the images ----

    def get_eval_image_metrics_and_images(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """One held-out view. Every rank calls it and gets the same metrics; rank 0 gets the pictures."""
        if self.team is not None and self.renders.leads_always:
            return self._with_helpers("get_eval_image_metrics_and_images", step)
        self.eval()
        metrics, images = self._measured(*self.datamanager.next_eval_image(step))
        self.train()
        return metrics, images

    def get_average_eval_image_metrics(
        self, step: int | None = None, output_path: Path | None = None, get_std: bool = False
    ) -> dict[str, float]:
        """Mean metrics of all held-out views. Every rank calls it and gets the same.

        Args:
            step: unused; nerfstudio passes it.
            output_path: folder for the images, if wanted.
            get_std: standard deviations too, as `<metric>_std`.
        """
        if self.team is not None and self.renders.leads_always:
            return self._with_helpers("get_average_eval_image_metrics", step, output_path, get_std)
        self.eval()
        if output_path is not None:
            output_path.mkdir(exist_ok=True, parents=True)
        rows: list[dict[str, Any]] = []
        for index in range(len(self.datamanager.eval_dataset)):
            metrics, images = self._measured(*self.datamanager.eval_image(index))
            rows.append(metrics)
            if output_path is not None:
                for name, image in images.items():
                    vutils.save_image(image.permute(2, 0, 1).cpu(), output_path / f"eval_{name}_{index:04d}.png")
        self.train()
        return means(rows, deviations=get_std)

    def _with_helpers(self, method: str, *args: Any) -> Any:
        """Calls a method on rank 0, which is here, and on its helpers."""
        assert self.team is not None
        self.team.tell(method, *args)
        with self.renders.side_by_side():
            return getattr(self, method)(*args)

    def _measured(self, camera: Any, batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        begun = perf_counter()
        outputs = self.model.get_outputs_for_camera(camera)
        pixels = int((camera.height * camera.width).item())
        metrics: dict[str, Any] = {}
        images: dict[str, Tensor] = {}
        if self.world.is_main:
            metrics, images = self.model.get_image_metrics_and_images(outputs, batch)
            metrics["num_rays"] = pixels
            metrics["num_rays_per_sec"] = pixels / (perf_counter() - begun)
            metrics["fps"] = metrics["num_rays_per_sec"] / pixels
        return broadcast_object(metrics, 0, self.world), images
