"""The pipeline: a step's batch, spread by a strategy; evaluation in lockstep. No DDP wrapper."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
import torchvision.utils as vutils
from nerfstudio.pipelines.base_pipeline import VanillaPipeline, VanillaPipelineConfig
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import track
from torch import Tensor

from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.core.collectives import all_gather_objects, broadcast_object
from ns_multigpu.core.like_views import alike, works
from ns_multigpu.core.schema import POSITION
from ns_multigpu.core.types import View
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.plugin.blocks.rehearsal import rehearse
from ns_multigpu.plugin.blocks.timing import StepTimer
from ns_multigpu.plugin.capture.checks import DIFFERENT, different_points, raise_together
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager, DistributedDataManagerConfig
from ns_multigpu.plugin.capture.device_observations import DeviceObservations
from ns_multigpu.plugin.capture.image_homes import homes_of
from ns_multigpu.plugin.capture.tracks import training_tracks
from ns_multigpu.plugin.checkpoint.beside import BesideCheckpoints
from ns_multigpu.plugin.checkpoint.kind import check_kind, without_kind
from ns_multigpu.plugin.checkpoint.own_rows import OwnRows, own_rows
from ns_multigpu.plugin.checkpoint.sharded_state import learn_placement, load_points
from ns_multigpu.plugin.checkpoint.verify import SHARDS, read_checkpoint_file, step_of
from ns_multigpu.plugin.export.ns_export import stream_for_ns_export
from ns_multigpu.plugin.faults.errors import show_uncaught
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.launch.process_world import get_world, set_world
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.model import exposures
from ns_multigpu.plugin.model.cameras import views_of
from ns_multigpu.plugin.model.kinds import times_note
from ns_multigpu.plugin.model.metrics import means
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.model.splat_model import SplatModel
from ns_multigpu.plugin.model.surfaces import check_primitive
from ns_multigpu.plugin.render import team, viewer
from ns_multigpu.plugin.render.evaluation import HeldOut, RenderedView, held_out_quality, rendered_views
from ns_multigpu.plugin.render.service import RenderService
from ns_multigpu.plugin.render.spiral import let_spirals_begin
from ns_multigpu.plugin.train.capacity import choose_cap
from ns_multigpu.plugin.train.exposure_choice import choose_exposure
from ns_multigpu.plugin.train.strategy import strategy_of
from strategies import STRATEGIES


@dataclass
class DistributedPipelineConfig(BesideCheckpoints, VanillaPipelineConfig):
    """Which strategy spreads the work, and over how large a batch."""

    _target: type = field(default_factory=lambda: DistributedPipeline)
    datamanager: DistributedDataManagerConfig = field(default_factory=DistributedDataManagerConfig)
    model: SplatModelConfig = field(default_factory=SplatModelConfig)
    strategy: str = "batch"
    """How the work of a step is spread over the ranks."""
    views_per_rank: int = 1
    """Views a rank in each step; the batch is this times the number of ranks."""
    views_per_step: int | None = None
    """Views of a step over all ranks, instead of views-per-rank times their number. Strategies that deal out whole
    views need a multiple of the number of ranks; those that cut views, any number."""
    level_steps: bool = True
    """Views that see about as many seed points come into one step, so that no GPU waits long for another. False takes
    them in splatfacto's order, as steps of one view always do."""

    transport: Literal["auto", "peer", "collective"] = "auto"
    """How splats and their gradients travel where points are sharded: "peer" reads and writes the other GPUs' memory
    (one machine with NVLink or peer access), "collective" goes through torch.distributed, with the same results."""
    tile_lists: Literal["gather", "sort"] = "gather"
    """How the splats of each tile are found where points are sharded: "gather", each rank sorts what it draws; "sort",
    one merge-path sort of all splats over all GPUs. The lists are the same."""
    wire: Literal["full", "half"] = "full"
    """With collective transport, what splats and their gradients are on the wire: "full" is float32, and changes
    nothing; "half" is float16 for all but positions and depths, and rounds: each rank's own splats not at all."""

    @property
    def options(self) -> Any:
        """What the strategy is made with, besides the ranks: a dataclass with a method `problem`; None for nothing."""
        return None

    def batch(self, ranks: int) -> int:
        """Views a step of so many ranks.

        Raises:
            InputError: views-per-rank or views-per-step is below 1.
        """
        checks.check_views_per_rank(self.views_per_rank)
        checks.check_views_per_step(self.views_per_step, ranks, cuts_views=True)
        return self.views_per_rank * ranks if self.views_per_step is None else self.views_per_step


@dataclass
class LocalityPipelineConfig(DistributedPipelineConfig):
    """The same, with what only the strategy `locality` has."""

    strategy: str = "locality"
    locality: LocalityOptions = field(default_factory=LocalityOptions)

    @property
    def options(self) -> LocalityOptions | None:
        """Those of the strategy."""
        return self.locality if self.strategy == "locality" else None


@dataclass
class PixelPipelineConfig(DistributedPipelineConfig):
    """The same, with what only the strategy `pixel` has."""

    strategy: str = "pixel"
    pixel: PixelOptions = field(default_factory=PixelOptions)

    @property
    def options(self) -> PixelOptions | None:
        """Those of the strategy."""
        return self.pixel if self.strategy == "pixel" else None


class DistributedPipeline(VanillaPipeline):
    """Datamanager, model and strategy of one rank.

    Raises:
        InputError: the strategy is unknown, or there are fewer views than the batch needs.
    """

    config: DistributedPipelineConfig
    datamanager: DistributedDataManager
    model: SplatModel

    def __init__(
        self,
        config: DistributedPipelineConfig,
        device: str,
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        grad_scaler: Any = None,
    ) -> None:
        viewer.mend()
        if test_mode != "val":
            show_uncaught()
            let_spirals_begin(DistributedDataManager)
        if test_mode == "inference":
            stream_for_ns_export()
        self.team: team.Team | None = None
        if test_mode != "val":
            config, self.team = team.begin(config, test_mode)
        checks.check_strategy(config.strategy, STRATEGIES)
        if test_mode == "val":
            check_primitive(config.model, config.strategy)
        checks.check_views_per_rank(config.views_per_rank)
        self.world = get_world(str(device))
        self.strategy = strategy_of(config, self.world)
        sharded = not self.strategy.placement.replicated
        checks.check_views_per_step(config.views_per_step, self.world.size, cuts_views=sharded)
        # A world of one as far as nerfstudio knows: it would wrap the model in DDP, which densification breaks.
        super().__init__(config, device, test_mode, world_size=1, local_rank=0, grad_scaler=grad_scaler)
        self.observed: DeviceObservations | None = None
        self._looks = test_mode != "val"  # and does not train
        if test_mode == "val":
            # Training: later than the datamanager because it knows, earlier than any image is read.
            run_parts().done("model")
            self.datamanager.check_capture()
            raise_together(different_points(self.model.seed_points, self.world), self.world, DIFFERENT)
            if config.model.depth_loss > 0:
                tracks = training_tracks(self.datamanager, self.world)
                self.observed = DeviceObservations(tracks, self.batch_size, self.world.device)
            checks.check_views(len(self.datamanager.train_dataset), 1 if sharded else self.world.size)
            if note := times_note(config.model.primitive, self.datamanager.train_dataset.cameras):
                CONSOLE.print(note, soft_wrap=True)
            seeds = self.model.seed_points
            if (seeds is None or len(seeds[0]) == 0) and not config.model.random_init:
                CONSOLE.print(
                    f"The capture has no seed points: training begins with {self.model.num_points:,} random Gaussians, "
                    "as Splatfacto's does (--pipeline.model.num-random and random-scale say how many, and where).",
                    soft_wrap=True,
                )
            choose_cap(self.model, self.datamanager.train_dataset.cameras)
            choose_exposure(self.model, self.datamanager, self.world)
            checks.check_cap(self.model.num_points, config.model.densifier, config.model.max_gs_num)
            self.strategy.placement.look(self._training_views)
            if sharded:
                self.model.hold_shard(self.strategy.placement, self.world)
        self.renders = RenderService(self.model, self.strategy)
        self.renders.install()
        self.timer = StepTimer(self.world.device)
        self.rehearsed: Callable[[], object] = lambda: None
        # Of steps through autograd; images that evaluation and the viewer ask for are nobody's.
        self.world.traffic.measured = lambda: self.timer.within("compute", "exchange")
        seed = broadcast_object(torch.initial_seed(), 0, self.world)
        self.model.prepare_densifier(self.world, seed)
        if self.team is not None:
            set_world(None)
        run_parts().done("placement and densifier")

    def _training_views(self) -> list[View]:
        """All training views, on the host, at full resolution, with the poses of the capture."""
        return views_of(self.datamanager.train_dataset.cameras)

    @property
    def batch_size(self) -> int:
        """Views a step, over all ranks."""
        return self.config.batch(self.world.size)

    def prepare_training(self) -> None:
        """Reads this rank's images. Every rank calls it; `rehearsed` then waits for what goes on beside it."""
        run_parts().done("optimizers, viewer, checkpoint, logs")
        self.rehearsed = rehearse(self.model, self.world)  # while images are decoded
        data, at_home = self.datamanager, self.strategy.placement.homes_of_views
        data.sequence.arrange = self.strategy.placement.arranged(self.batch_size) or self._arranged()
        if self.world.machines > 1 and len(at_home) == len(data.train_dataset):
            per_machine = self.world.size // self.world.machines
            data.hold_by(homes_of(at_home, data.train_shapes, self.world.machines, per_machine, data.train_memory))
        _ = self.datamanager.train_share
        _ = self.datamanager.train_cameras_on_device
        run_parts().done("images")

    def _arranged(self) -> Callable[[list[int], int], list[int]] | None:
        """Puts views of like work into one step; None where there is nothing to choose, or nothing to tell by.

        It goes by the capture alone: a run that goes on, and one with another strategy, has the same order.
        """
        seeds, size = self.model.seed_points, self.batch_size
        if not self.config.level_steps or size < 2 or seeds is None or len(seeds[0]) == 0:
            return None
        work: list[float] = []
        if self.world.is_main:
            work = works(seeds[0].cpu(), self._training_views())
        work = broadcast_object(work, 0, self.world)  # for processors round differently
        return lambda order, begins: alike(order, work, size, -begins % size)

    def own_rows(self, loaded_state: dict[str, Any]) -> OwnRows:
        """The rows of a .ckpt's points that this rank goes on with, as its placement says; all where it holds all.

        Raises:
            InputError: the shards are missing or damaged.
        """
        holding = self.model.holding
        return own_rows(loaded_state, self.config.checkpoints, holding and holding.placement, self.world)

    def load_pipeline(self, loaded_state: dict[str, Any], step: int) -> None:
        """Loads what a .ckpt holds, and the points that it names if they are in shards: this rank's, or all of them.

        Args:
            loaded_state: the .ckpt's pipeline.
            step: its step.

        Raises:
            InputError: the shards are missing or damaged.
        """
        if self.team is not None:
            models = self.config.checkpoints
            assert models is not None, "it was looked at before there was a team"
            with CONSOLE.status("Loading Gaussians onto all devices"):
                self.team.tell("load_file", models / f"step-{step:09d}.ckpt")
                self._load_own(loaded_state, step)
            self.renders.lead_always()
            return
        self._load_own(loaded_state, step)

    def load_file(self, path: Path) -> None:
        """Loads a .ckpt as `load_pipeline` does. Every rank calls it.

        Raises:
            InputError: it is missing or damaged.
        """
        self._load_own(read_checkpoint_file(path)["pipeline"], step_of(path))

    def _load_own(self, loaded_state: dict[str, Any], step: int) -> None:
        model, load = self.model, super().load_pipeline
        where = str((self.config.checkpoints or Path()) / f"step-{step:09d}.ckpt")
        check_kind(loaded_state, model.config.primitive, where)
        loaded_state = without_kind(loaded_state)
        exposures.expect(model, loaded_state, looks=self._looks)
        if self.renders.shared and not model.sharded:
            model.hold_shard(self.strategy.placement, self.world)
        if SHARDS not in loaded_state and not model.sharded:
            load(loaded_state, step)
            return
        folder = self.config.checkpoints
        if model.holding is not None:
            learn_placement(model.holding.placement, loaded_state, folder)
        own = self.own_rows(loaded_state)
        load_points(lambda rest: load(rest, step), model.gauss_params, loaded_state, folder, own.rows, model.device)
        if model.holding is not None:
            places = None if own.places is None else own.places.to(model.device)
            model.holding.hold(places, model.gauss_params[POSITION], own.counts)
            model.count_shards()

    def get_train_loss_dict(
        self, step: int, *, metrics: bool = False
    ) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
        """This rank's share of the step's losses; summed over ranks they are the batch's.

        Args:
            step: the step; its views follow from it.
            metrics: whether to compute metrics (the trainer asks when it logs).
        """
        data, model, timer = self.datamanager, self.model, self.timer
        with timer.measure("data"):
            indices = data.train_batch(step, self.batch_size)
            views = model.training_views(
                [(data.train_camera(i), data.train_camera_on_device(i)) for i in indices], indices
            )
            views = views if self.observed is None else self.observed.given(views)
            primitive = model.primitive(depth=model.config.output_depth_during_training)
            self.strategy.observe(primitive, model.points, model.step)
            plan = self.strategy.plan(views, [data.train_share.holder(i) for i in indices])
            images = data.train_share.deliver(indices, plan, self.world.device, views)
        with timer.measure("compute"):
            rendering = self.strategy.render(primitive, model.points, views, plan)
            losses, measured = model.patch_losses(rendering, views, images, world=self.world, metrics=metrics)
        return {}, losses, measured

    def get_eval_image_metrics_and_images(self, step: int) -> tuple[dict[str, float], dict[str, Tensor]]:
        """One held-out view, drawn by the step. Every rank calls it and gets the same."""
        self.eval()
        camera, batch = self.datamanager.next_eval_image(step)
        outputs = self.model.get_outputs_for_camera(camera)
        metrics, images = self.model.get_image_metrics_and_images(outputs, batch)
        metrics["num_rays"] = int((camera.height * camera.width * camera.size).item())
        self.train()
        return metrics, images

    def held_out_quality(self, most: int) -> HeldOut | None:
        """See `evaluation.held_out_quality`."""
        self.eval()
        found = held_out_quality(self.model, self.datamanager, self.renders, self.world, most)
        self.train()
        return found

    def get_average_eval_image_metrics(
        self, step: int | None = None, output_path: Path | None = None, get_std: bool = False
    ) -> dict[str, float]:
        """Mean metrics over the held-out views, each rank measuring those whose images it holds. Every rank calls it.

        Args:
            step: unused; nerfstudio passes it.
            output_path: folder for the images, if wanted.
            get_std: standard deviations too, as `<metric>_std`.
        """
        if self.team is not None and self.renders.leads_always:
            self.team.tell("get_average_eval_image_metrics", step, output_path, get_std)
            with self.renders.side_by_side():
                return self.get_average_eval_image_metrics(step, output_path, get_std)
        self.eval()
        if output_path is not None:
            output_path.mkdir(exist_ok=True, parents=True)
        share = self.datamanager.eval_share
        views: Iterable[RenderedView] = rendered_views(self.model, self.datamanager, self.renders, self.world)
        rows: dict[int, dict[str, float]] = {}
        if self.world.is_main:
            views = track(views, "Evaluating held-out views", total=len(share.own), console=CONSOLE, transient=True)
        for view in views:
            index, start = view.index, perf_counter() - view.seconds
            pixels = int((view.camera.height * view.camera.width).item())
            metrics, images = self.model.get_image_metrics_and_images(view.outputs, view.image)
            metrics["num_rays_per_sec"] = pixels / (perf_counter() - start)
            metrics["fps"] = metrics["num_rays_per_sec"] / pixels
            rows[index] = metrics
            if output_path is not None:
                for name, image in images.items():
                    vutils.save_image(image.permute(2, 0, 1).cpu(), output_path / f"eval_{name}_{index:04d}.png")
        self.train()
        gathered: dict[int, dict[str, float]] = {}
        for part in all_gather_objects(rows, self.world):
            gathered.update(part)
        # In the order of the views, so that the mean has the same bits on every world size.
        return means([gathered[index] for index in sorted(gathered)], deviations=get_std)
