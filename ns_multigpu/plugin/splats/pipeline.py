"""Pipeline of splats: a step's batch is spread over ranks by a strategy; evaluation runs in lockstep. No DDP
wrapper."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.pipelines.base_pipeline import VanillaPipeline
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.core.assign.balanced_views import alike, works
from ns_multigpu.core.dist.collectives import broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import POSITION
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import View
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.plugin.blocks.warmup import warm_up
from ns_multigpu.plugin.capture.checks import DIFFERENT, check_far_plane, different_points, raise_together
from ns_multigpu.plugin.capture.datamanager import (
    DistributedDataManager,
    DistributedDataManagerConfig,
    let_spirals_begin,
)
from ns_multigpu.plugin.capture.device_observations import DeviceObservations
from ns_multigpu.plugin.capture.image_owners import image_owners_of, swapped_owners
from ns_multigpu.plugin.checkpoint.objective_kind import check_kind, without_kind
from ns_multigpu.plugin.checkpoint.own_rows import SavedRows, own_rows
from ns_multigpu.plugin.checkpoint.sharded_state import POINTS, learn_placement, load_points, shapes_in
from ns_multigpu.plugin.checkpoint.verify import SHARDS
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.launch.option_help import Only
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.model import exposures
from ns_multigpu.plugin.model.cameras import views_of
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.model.splat_model import SplatModel
from ns_multigpu.plugin.model.surfaces import check_primitive
from ns_multigpu.plugin.model.time_notes import frames_note, times_note
from ns_multigpu.plugin.render import team
from ns_multigpu.plugin.render.pictures import Pictures
from ns_multigpu.plugin.render.service import RenderService
from ns_multigpu.plugin.run.pipeline import RunPipeline, RunPipelineConfig
from ns_multigpu.plugin.splats.capacity import choose_cap
from ns_multigpu.plugin.splats.depth_maps import training_observations
from ns_multigpu.plugin.splats.exposure_choice import choose_exposure
from ns_multigpu.plugin.splats.from_ply import begin_from_ply
from ns_multigpu.plugin.splats.lenses import check_lenses
from ns_multigpu.plugin.splats.normal_maps import training_normals
from ns_multigpu.primitives.registry import titled
from strategies import STRATEGIES


@dataclass
class DistributedPipelineConfig(RunPipelineConfig):
    """Options of the strategy that spreads the work, and of the batch size."""

    has_splats: ClassVar[bool] = True

    _target: type = field(default_factory=lambda: DistributedPipeline)
    datamanager: DistributedDataManagerConfig = field(default_factory=DistributedDataManagerConfig)
    model: SplatModelConfig = field(default_factory=SplatModelConfig)
    strategy: str = "batch"
    """Strategy that spreads the work of a step over the ranks."""
    views_per_rank: int = 1
    """Views per rank in each step; the batch is this times the number of ranks."""
    views_per_step: int | None = None
    """Views of a step over all ranks, instead of views-per-rank times their number. Strategies that assign full views
    to ranks need a multiple of the number of ranks; those that split views accept any number."""
    level_steps: bool = True
    """Group views that see about equally many seed points into one step, so that no GPU waits long for another. False
    keeps splatfacto's order, which steps of one view always have."""

    transport: Annotated[
        Literal["auto", "peer", "collective"], Only("pipeline.strategy", "batch", "tile", "locality")
    ] = "auto"
    """GPU-to-GPU transfer: peer (NVLink or P2P on one machine) or collective (NCCL), with the same results. auto: peer
    where it is available. batch: auto or collective."""
    tile_lists: Annotated[Literal["gather", "sort"], Only("pipeline.strategy", "tile")] = "gather"
    """Construction of each tile's list of splats if points are sharded: with "gather" each rank sorts what it draws;
    "sort" is one merge-path sort of all splats over all GPUs. The lists are the same."""
    wire: Annotated[Literal["full", "half"], Only("pipeline.strategy", "tile", "locality")] = "full"
    """Precision of communication by collectives: full (float32) or half (float16 for all but positions and depths)."""

    @property
    def options(self) -> Any:
        """Options of the strategy besides the ranks: a dataclass with a method `problem`; None for none."""
        return None

    def batch(self, ranks: int) -> int:
        """Return the number of views per step on `ranks` ranks.

        Raises:
            InputError: views-per-rank or views-per-step is below 1.
        """
        checks.check_views_per_rank(self.views_per_rank)
        checks.check_views_per_step(self.views_per_step, ranks, cuts_views=True)
        return self.views_per_rank * ranks if self.views_per_step is None else self.views_per_step

    def team_plan(self, state: Mapping[str, Any], checkpoint: Path, devices: team.Devices) -> team.TeamPlan | None:
        """See `RunPipelineConfig.team_plan`."""
        return team.plan_for_points(state, checkpoint, devices)

    def most_ranks(self, state: Mapping[str, Any], checkpoint: Path) -> int | None:
        """See `RunPipelineConfig.most_ranks`."""
        if not any(name.startswith(POINTS) for name in shapes_in(state)):
            title = titled(self.model.primitive)
            raise InputError(f"{checkpoint} is not a checkpoint of {title}: it has no {POINTS}means.")
        return None

    def memory_remedies(self, on_gpu: bool) -> Sequence[str]:
        """See `RunPipelineConfig.memory_remedies`."""
        return [
            *(["fewer views on a rank: --pipeline.views-per-rank 1"] if self.views_per_rank > 1 else []),
            "smaller images: --downscale-factor 2 (behind the dataparser's name: colmap, nerfstudio-data)",
            "fewer Gaussians: --pipeline.model.max-gaussians N (`ns-multigpu plan` says what fits)",
            "more GPUs, each with a part of the Gaussians: splatfacto-tile",
            "images kept on the host: --pipeline.datamanager.cache-images cpu (the default)"
            if on_gpu
            else "images kept as bytes: --pipeline.datamanager.cache-images-type uint8 (the default)",
        ]


@dataclass
class LocalityPipelineConfig(DistributedPipelineConfig):
    """Pipeline options with those of the strategy `locality`."""

    strategy: str = "locality"
    locality: LocalityOptions = field(default_factory=LocalityOptions)

    @property
    def options(self) -> LocalityOptions | None:
        """Options of the strategy `locality`."""
        return self.locality if self.strategy == "locality" else None


@dataclass
class PixelPipelineConfig(DistributedPipelineConfig):
    """Pipeline options with those of the strategy `pixel`."""

    strategy: str = "pixel"
    pixel: PixelOptions = field(default_factory=PixelOptions)

    @property
    def options(self) -> PixelOptions | None:
        """Options of the strategy `pixel`."""
        return self.pixel if self.strategy == "pixel" else None


def strategy_of(config: DistributedPipelineConfig, world: World) -> Strategy:
    """Return the strategy of a run, with its options if it has any.

    Raises:
        InputError: an option is out of range.
    """
    make, options = STRATEGIES[config.strategy], config.options
    if options is not None and (problem := options.problem()):
        raise InputError(f"--pipeline.{config.strategy}.{problem}.")
    try:
        strategy = make(world) if options is None else make(world, options)
    except ValueError as error:  # it does not fit these ranks
        raise InputError(str(error)) from error
    strategy.rows.half, strategy.rows.slots = config.wire == "half", config.tile_lists == "sort"
    return strategy


class DistributedPipeline(RunPipeline):
    """Datamanager, model and strategy of one rank.

    Raises:
        InputError: the strategy is unknown, or there are fewer views than the batch needs.
    """

    config: DistributedPipelineConfig
    datamanager: DistributedDataManager
    model: SplatModel

    def begin(self, config: DistributedPipelineConfig, test_mode: str) -> None:
        """See `RunPipeline.begin`."""
        if not self.trains:
            let_spirals_begin()
        checks.check_strategy(config.strategy, STRATEGIES)
        if self.trains:
            check_primitive(config.model, config.strategy)
        if config.model.load_ply is not None:
            config.model.sh_degree_interval = 1  # the file's colours have all harmonics
        checks.check_views_per_rank(config.views_per_rank)
        self.strategy = strategy_of(config, self.world)
        sharded = not self.strategy.placement.replicated
        checks.check_views_per_step(config.views_per_step, self.world.size, cuts_views=sharded)

    def complete(self) -> None:
        """See `RunPipeline.complete`."""
        self.observed: list[DeviceObservations] = []
        if self.trains:
            self._check_and_place()
        self.renders = RenderService(self.model, Pictures(self.model, self.strategy), self.world)
        self.warmed_up: Callable[[], object] = lambda: None
        # Counts the exchange of steps through autograd; images for evaluation and the viewer are not counted.
        self.world.traffic.measured = lambda: self.timer.within("compute", "exchange")
        seed = broadcast_object(torch.initial_seed(), 0, self.world)
        self.model.prepare_densifier(self.world, seed)
        run_parts().done("placement and densifier")

    def _check_and_place(self) -> None:
        """Check the capture, choose options that follow from it, and spread the points, before training.

        It runs after the datamanager is built, which knows the capture, and before any image is read.
        """
        config = self.config
        run_parts().done("model")
        if config.model.sky_loss > 0:
            self.datamanager.read_sky("--pipeline.model.sky-loss")
        self.datamanager.check_capture()
        if not config.datamanager.undistort:
            check_lenses([self.datamanager.train_dataset, self.datamanager.eval_dataset], self.world)
        raise_together(different_points(self.model.seed_points, self.world), self.world, DIFFERENT)
        if config.model.depth_loss > 0:
            tracks = training_observations(self.datamanager, config.model.depth_maps, self.world)
            self.observed.append(DeviceObservations("observations", tracks, self.batch_size, self.world.device))
        if config.model.normal_map_loss > 0:
            outputs = self.datamanager.train_dataparser_outputs
            tracks = training_normals(outputs, self.world, self.datamanager.sky)
            self.observed.append(DeviceObservations("normals", tracks, self.batch_size, self.world.device))
        sharded = not self.strategy.placement.replicated
        checks.check_views(len(self.datamanager.train_dataset), 1 if sharded else self.world.size)
        if note := times_note(config.model.primitive, self.datamanager.train_dataset.cameras):
            CONSOLE.print(note, soft_wrap=True)
        seeds = self.model.seed_points
        if config.model.far_plane is not None and seeds is not None:
            check_far_plane(config.model.far_plane, seeds[0], self._training_views(), self.world)
        self.strategy.placement.look(self._training_views, self.model.far)
        if config.model.load_ply is not None and config.resumed_from is None:
            outputs = self.datamanager.train_dataparser_outputs
            begin_from_ply(self.model, outputs, self.strategy.placement, self.world)
        elif (seeds is None or len(seeds[0]) == 0) and not config.model.random_init:
            CONSOLE.print(
                f"The capture has no seed points: training begins with {self.model.num_points:,} random Gaussians, "
                "as Splatfacto's does (--pipeline.model.num-random and random-scale say how many, and where).",
                soft_wrap=True,
            )
        choose_cap(self.model, self.datamanager.train_dataset.cameras)
        choose_exposure(self.model, self.datamanager, self.world)
        checks.check_cap(self.model.total_points, config.model.densifier, config.model.max_gaussians)
        if sharded and not self.model.sharded:
            self.model.hold_shard(self.strategy.placement, self.world)

    def _training_views(self) -> list[View]:
        """Return all training views, on the host, at full resolution, with the poses of the capture."""
        return views_of(self.datamanager.train_dataset.cameras)

    @property
    def batch_size(self) -> int:
        """Views per step, over all ranks."""
        return self.config.batch(self.world.size)

    @property
    def images_per_step(self) -> int:
        """See `RunPipeline.images_per_step`."""
        return self.batch_size

    @property
    def described(self) -> str:
        """See `RunPipeline.described`."""
        return f"{self.model.total_points} Gaussians"

    @property
    def memory_facts(self) -> Sequence[str]:
        """See `RunPipeline.memory_facts`."""
        cameras = self.datamanager.train_dataset.cameras
        size = f"{int(cameras.width.max())}x{int(cameras.height.max())}"
        views = f"{self.config.views_per_rank} view(s) a step on this rank"
        return [f"{self.model.num_points:,} Gaussians", f"{views}, images of up to {size} pixels"]

    def prepare_training(self) -> None:
        """Read this rank's images and start the warm-up in parallel; `warmed_up` waits for it. Every rank calls it."""
        run_parts().done("optimizers, viewer, checkpoint, logs")
        self.warmed_up = warm_up(self.model, self.world)  # while images are decoded
        data, at_home = self.datamanager, self.strategy.placement.view_owners
        data.sequence.arrange = self.strategy.placement.arranged(self.batch_size) or self._arranged()
        if self.world.machines > 1 and len(at_home) == len(data.train_dataset):
            per_machine = self.world.size // self.world.machines
            data.hold_by(
                image_owners_of(at_home, data.train_shapes, self.world.machines, per_machine, data.train_memory)
            )
        _ = self.datamanager.train_share
        _ = self.datamanager.train_cameras_on_device
        run_parts().done("images")

    def move_images(self) -> None:
        """Move images to the machines whose points their views see, after points were placed again. Every rank calls it
        between steps.
        """
        share, at_home = self.datamanager.train_share, self.strategy.placement.view_owners
        if self.world.machines > 1 and len(at_home) == len(share.shapes):
            per_machine = self.world.size // self.world.machines
            share.move(swapped_owners(share.owners, at_home, share.shapes, per_machine))

    def _arranged(self) -> Callable[[list[int], int], list[int]] | None:
        """Return a function that groups views of similar work into one step; None if there is no choice, or no seed
        point.

        It depends on the capture alone, so resumed runs and runs with another strategy have the same order.
        """
        seeds, size = self.model.seed_points, self.batch_size
        if not self.config.level_steps or size < 2 or seeds is None or len(seeds[0]) == 0:
            return None
        work: list[float] = []
        if self.world.is_main:
            work = works(seeds[0].cpu(), self._training_views(), self.model.far)
        work = broadcast_object(work, 0, self.world)  # processors round differently
        return lambda order, begins: alike(order, work, size, -begins % size)

    def own_rows(self, loaded_state: dict[str, Any]) -> SavedRows:
        """Return the rows of a .ckpt's points that this rank's placement assigns to it; all rows if points are
        replicated.

        Raises:
            InputError: the shards are missing or damaged.
        """
        shard_index = self.model.shard_index
        return own_rows(loaded_state, self.config.checkpoints, shard_index and shard_index.placement, self.world)

    def frames_note(self, cameras: Sequence[Cameras]) -> str:
        """Return the note of `RunPipeline.frames_note` on moving points: which moments are shown."""
        return frames_note(self.config.model.primitive, list(cameras))

    def load_own(self, loaded_state: dict[str, Any], step: int) -> None:
        """Load this rank's points from shards, or all points; see `RunPipeline.load_own`."""
        model, load = self.model, partial(VanillaPipeline.load_pipeline, self)
        where = str((self.config.checkpoints or Path()) / f"step-{step:09d}.ckpt")
        check_kind(loaded_state, model.config.primitive, where)
        loaded_state = without_kind(loaded_state)
        exposures.expect(model, loaded_state, looks=not self.trains)
        if self.renders.shared and not model.sharded:
            model.hold_shard(self.strategy.placement, self.world)
        if SHARDS not in loaded_state and not model.sharded:
            load(loaded_state, step)
            return
        folder = self.config.checkpoints
        if model.shard_index is not None:
            learn_placement(model.shard_index.placement, loaded_state, folder)
        own = self.own_rows(loaded_state)
        load_points(lambda rest: load(rest, step), model.gauss_params, loaded_state, folder, own.rows, model.device)
        if model.shard_index is not None:
            places = None if own.places is None else own.places.to(model.device)
            model.shard_index.hold(places, model.gauss_params[POSITION], own.counts)
            model.count_shards()

    def get_train_loss_dict(
        self, step: int, *, metrics: bool = False
    ) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
        """Return this rank's share of the step's losses; summed over ranks they are the batch's.

        Args:
            step: the step; its views follow from it.
            metrics: whether to compute metrics (the trainer requests them when it logs).
        """
        data, model, timer = self.datamanager, self.model, self.timer
        with timer.measure("data"):
            indices = data.train_batch(step, self.batch_size)
            views = model.training_views(
                [(data.train_camera(i), data.train_camera_on_device(i)) for i in indices], indices
            )
            for observed in self.observed:
                views = observed.given(views)
            primitive = model.primitive(depth=model.config.output_depth_during_training)
            self.strategy.observe(primitive, model.points, model.step)
            plan = self.strategy.plan(views, [data.train_share.holder(i) for i in indices])
            images = data.train_share.deliver(indices, plan, self.world.device, views)
        with timer.measure("compute"):
            rendering = self.strategy.render(primitive, model.points, views, plan)
            losses, measured = model.patch_losses(rendering, views, images, world=self.world, metrics=metrics)
        return {}, losses, measured
