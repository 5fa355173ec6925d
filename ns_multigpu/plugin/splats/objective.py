"""Objective of `splatfacto-*`: points that a strategy spreads over the ranks, and densifies."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from cuda_ext.ops.optim.adam import mean_step, shorten_step
from ns_multigpu.core.dist.collectives import all_gather_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import POSITION, names
from ns_multigpu.planning.memory import checkpoint_bytes
from ns_multigpu.planning.work import Workload
from ns_multigpu.plugin.blocks.fused_blocks import FusedBlocks, Measured
from ns_multigpu.plugin.checkpoint.atomic_save import Opened
from ns_multigpu.plugin.checkpoint.training_copy import Content
from ns_multigpu.plugin.faults.out_of_memory import Attempt
from ns_multigpu.plugin.model.optimizers import BatchOptimizers
from ns_multigpu.plugin.model.splat_model import SplatModel
from ns_multigpu.plugin.render.partition_picture import MOST_POINTS, PictureContent, save
from ns_multigpu.plugin.run.last_save import warn_of_disk
from ns_multigpu.plugin.run.objective import LogEntry, Objective, Resumed
from ns_multigpu.plugin.splats.capacity import announce, warn_of_size_rule
from ns_multigpu.plugin.splats.pipeline import DistributedPipeline
from ns_multigpu.plugin.splats.state import SplatState

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.config import DistributedTrainerConfig

_OF_PARAMETERS = ("scale_reg", "mcmc_opacity_reg", "mcmc_scale_reg", "tv_loss", "exposure_drift")
"""Terms of the loss that no pixel has. The logged loss lacks them: fused steps compute their gradients alone."""


class SplatObjective(Objective):
    """Objective of splats."""

    unit = "images"
    config: "DistributedTrainerConfig"
    pipeline: DistributedPipeline
    optimizers: BatchOptimizers

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._attempt = Attempt(self)
        self._state = SplatState(self.config, self.world, self.pipeline, self.optimizers)
        self.picture: PartitionPicture | None = None

    # ---- before the first step ----

    def build_optimizers(self) -> BatchOptimizers:
        """Return optimizers scaled for the batch; see `Objective.build_optimizers`."""
        config, pipeline = self.config, self.pipeline
        views = len(pipeline.datamanager.train_dataset)
        rate_schedule = config.rate_schedule(pipeline.batch_size, views)
        CONSOLE.print(rate_schedule.described(views if config.batch_scaling == "auto" else None), soft_wrap=True)
        compact = names(pipeline.model.schema) if pipeline.model.config.optimizer_state == "compact" else ()
        fused = config.fused_steps == "always" or bool(compact)
        spread = pipeline.model.spread_parameters()
        what = (config.optimizers.copy(), pipeline.get_param_groups(), rate_schedule)
        return BatchOptimizers(*what, fused=fused, compact=compact, spread=spread)

    def prepare(self) -> None:
        """Read images and prepare as `Objective.prepare`."""
        self.pipeline.prepare_training()
        super().prepare()
        self.guards.numbers.replicated = self.pipeline.strategy.placement.replicated

    def begin(self, first: int) -> None:
        """Choose how steps run; see `Objective.begin`. If steps are fused, load images onto the GPUs."""
        given = (self.config, self.pipeline, self.optimizers, self.world, self.guards)
        self.blocks = FusedBlocks.if_asked_for(*given, first)
        if self.blocks is None:
            self.guards.numbers.prepare(self.optimizers.optimizers)
        announce(self.pipeline, self.optimizers, self.world, fused=self.blocks is not None)
        images = self.config.max_num_iterations * self.pipeline.batch_size
        warn_of_size_rule(self.pipeline.model, self.world, images)
        if self.world.is_main:
            options = self.pipeline.model.config
            grown = options.max_gaussians if options.densifier == "mcmc" else None
            points = max(self.pipeline.model.total_points, grown or 0)
            needed, most = self._checkpoint_bytes(points), self.config.most_checkpoints()
            warn_of_disk(self.config.get_checkpoint_dir(), points, needed, most)

    # ---- steps ----

    def begin_step(self, step: int) -> None:
        """See `Objective.begin_step`."""
        self.pipeline.model.step = step * self.pipeline.batch_size

    def step(self, step: int, *, metrics: bool) -> Measured:
        """Run a step through autograd; see `Objective.step`."""
        timer, gradients = self.pipeline.timer, self.pipeline.strategy.gradients
        self.optimizers.zero_grad_all()
        with self._attempt.rendering(step):
            _, losses, measured = self.pipeline.get_train_loss_dict(step, metrics=metrics)
            loss = functools.reduce(torch.add, losses.values())
            with timer.measure("compute"):
                gradients.begin_backward(self.parameters())
                loss.backward()
        with timer.measure("exchange"):
            gradients.end_backward()
        self._attempt.rendered(step)
        with timer.measure("compute"):
            if self._gradients_usable(step):
                self._shorten_steps()
                self.optimizers.optimizer_step_all()
            for scheduler in self.optimizers.schedulers.values():
                scheduler.step()
        shown = [value.detach() for name, value in losses.items() if name not in _OF_PARAMETERS]
        return functools.reduce(torch.add, shown), losses, measured

    def _shorten_steps(self) -> None:
        model, whole = self.pipeline.model, self.pipeline.model.config.mcmc_whole_step_scale
        if model.config.densifier == "mcmc" and whole > 0:
            shorten_step(self.optimizers.optimizers[POSITION], mean_step(model.scales, whole))

    def parameters(self) -> list[Tensor]:
        """Return the optimized parameters, points last: gradients become ready in the reverse of this order."""
        model = self.pipeline.model
        points = {id(p) for p in model.gauss_params.values()}
        others: list[Tensor] = [p for p in model.parameters() if id(p) not in points]
        return others + list(model.gauss_params.values())

    def _gradients_usable(self, step: int) -> bool:
        model = self.pipeline.model
        rendering = model.rendering
        return self.guards.numbers.watch(
            step,
            model.view_losses,
            dict(model.named_parameters()),
            self.optimizers.optimizers,
            rendering.splats.probe if rendering is not None else None,
        )

    def replicated(self) -> dict[str, Tensor]:
        """See `Objective.replicated`."""
        same = {id(param) for param in self.pipeline.model.replicated_parameters()}
        return {name: param for name, param in self.pipeline.model.named_parameters() if id(param) in same}

    @property
    def placement_changed(self) -> bool:
        """See `Objective.placement_changed`."""
        return self.picture is not None and self.picture.due

    def follow_placement(self, folder: Path) -> None:
        """Move images to their views' new owners, and draw the partition; see `Objective.follow_placement`."""
        if self.picture is None:
            poses = self.pipeline.datamanager.train_dataset.cameras.camera_to_worlds
            self.picture = PartitionPicture(self.pipeline.model, poses, self.world, folder)
        elif self.picture.due:
            self.pipeline.move_images()
        if self.picture.due:
            self.picture.draw()

    def release(self) -> None:
        """See `Objective.release`."""
        self.pipeline.model.rendering = None
        super().release()

    # ---- words and numbers ----

    @property
    def units_per_step(self) -> int:
        """See `Objective.units_per_step`."""
        return self.pipeline.batch_size

    @property
    def rays_per_step(self) -> int:
        """See `Objective.rays_per_step`."""
        return self.pipeline.batch_size * self.pipeline.datamanager.get_train_rays_per_batch()

    def log(self, measured: Measured) -> LogEntry:
        """See `Objective.log`."""
        model, densifier = self.pipeline.model, self.pipeline.model.densifier
        row = {
            "gaussians": float(model.total_points),
            **changes_of(densifier),
            **reordering_of(densifier),
            **self.pipeline.strategy.assignment.figures(),
        }
        metrics: dict[str, Any] = {"gaussian_count": model.total_points}
        model.camera_optimizer.get_metrics_dict(metrics)
        rates = {name: scheduler.get_last_lr()[0] for name, scheduler in self.optimizers.schedulers.items()}
        return LogEntry(measured, self.pipeline.batch_size, row, metrics, rates)

    def size(self) -> dict[str, int]:
        """See `Objective.size`."""
        return {"gaussians": self.pipeline.model.total_points}

    def lost(self, steps: int) -> tuple[str, int]:
        """See `Objective.lost`."""
        points, images = self.pipeline.model.total_points, steps * self.pipeline.batch_size
        needed = self._checkpoint_bytes(points)
        return f"the model after {images:,} images ({points:,} Gaussians, {needed / 1e6:,.0f} MB)", needed

    def _checkpoint_bytes(self, points: int) -> int:
        model, options = self.pipeline.model, self.pipeline.model.config
        compact = options.optimizer_state == "compact"
        return checkpoint_bytes(
            Workload(points, 1, 1, sh_degree=options.sh_degree, compact=compact, schema=model.schema)
        )

    # ---- checkpoints ----

    def content(self, step: int) -> Content:
        """See `Objective.content`."""
        return self._state.content(step)

    def resume(self, opened: Opened) -> Resumed:
        """Load a checkpoint, redistributing points of another number of ranks; see `Objective.resume`."""
        return self._state.resume(opened)


class PartitionPicture:
    """Drawing of the partition at the start and after each change of placement. Made on every rank.

    Args:
        model: the model whose points are spread; a replicated model is not drawn.
        cameras: [V, 3, 4] the training views' poses (camera to world).
        world: the ranks. folder: the run's.
    """

    def __init__(self, model: SplatModel, cameras: Tensor, world: World, folder: Path) -> None:
        self._model, self._cameras, self._world, self._folder = model, cameras, world, folder
        self._drawn: int | None = None

    @property
    def due(self) -> bool:
        """True if the partition has changed since the last drawing; the same on every rank."""
        shard_index = self._model.shard_index
        if self._world.size == 1 or not self._model.sharded or shard_index is None:
            return False
        return shard_index.placement.placings != self._drawn

    @torch.no_grad()
    def draw(self) -> None:
        """Draw the partition on rank 0 from a sample of all points, and print the placement's remarks. Every rank calls
        it.

        If the disk fails, print a message; the run continues.
        """
        model, world = self._model, self._world
        assert model.shard_index is not None and model.shard_counts is not None
        self._drawn = model.shard_index.placement.placings
        stride = -(-model.total_points // MOST_POINTS)
        mine = model.gauss_params[POSITION].detach()[::stride].float().contiguous()
        sample, counts = all_gather_rows(mine, world)
        if not world.is_main:
            return
        for remark in model.shard_index.placement.remarks():
            CONSOLE.print(remark, soft_wrap=True)
        view_owners = np.array(model.shard_index.placement.view_owners, dtype=np.int64)
        if len(view_owners) != len(self._cameras):  # a saved placement, of a capture with other views
            view_owners = view_owners[:0]
        picture = PictureContent(
            positions=sample.cpu().double().numpy(),
            owners=np.repeat(np.arange(world.size), counts),
            points=model.shard_counts,
            cameras=self._cameras[:, :3, 3].cpu().double().numpy(),
            view_owners=view_owners,
            machines=world.machines,
        )
        if file := save(picture, self._folder):
            device = "GPU" if world.device.type == "cuda" else "worker"
            CONSOLE.print(f"Map of which {device} stores which Gaussians: {file}", soft_wrap=True)


def changes_of(densifier: Any) -> dict[str, float]:
    """Return the points duplicated, split and pruned by refinements since the last call; empty with MCMC."""
    changes: dict[str, int] = getattr(densifier, "changes", {})
    totals = {name: float(count) for name, count in changes.items()}
    changes.clear()
    return totals


def reordering_of(densifier: Any) -> dict[str, float]:
    """Return the effect and cost of the last reordering of a sharded model's ranges; empty if already returned."""
    done = getattr(densifier, "reordering", None)
    if done is None:
        return {}
    densifier.reordering = None
    return {
        "reordering_ms": 1e3 * done.seconds,
        "reordering_points_moved": float(done.moved),
        "reordering_bytes": float(done.bytes_sent),
        "imbalance_before": done.imbalance_before,
        "imbalance_after": done.imbalance_after,
    }
