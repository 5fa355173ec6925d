"""The training loop of one rank of `nerfacto-xl`, in step with the others."""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nerfstudio.engine.callbacks import TrainingCallbackLocation
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.engine.trainer import Trainer
from nerfstudio.utils import writer
from nerfstudio.utils.misc import step_check
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName, TimeWriter
from rich.text import Text
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_ints, barrier, sum_in_place
from ns_multigpu.core.replicas import assert_identical, broadcast_in_place
from ns_multigpu.plugin.checkpoint.verify import checkpoints_in
from ns_multigpu.plugin.faults import memory
from ns_multigpu.plugin.faults.errors import InputError, SaveFailed
from ns_multigpu.plugin.faults.guards import Guards
from ns_multigpu.plugin.faults.signals import RanOutOfMemory
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.launch.commands import resume_command
from ns_multigpu.plugin.launch.machines import enter_world
from ns_multigpu.plugin.launch.run_folder import abandoned_unless_begun
from ns_multigpu.plugin.radiance.checkpoints import RadianceCheckpoints
from ns_multigpu.plugin.radiance.fast_steps import FastSteps, obstacle
from ns_multigpu.plugin.radiance.pipeline import RadiancePipeline, RadiancePipelineConfig
from ns_multigpu.plugin.radiance.step_graphs import GraphsByKind
from ns_multigpu.plugin.render import viewing
from ns_multigpu.radiance.exchange import balance, bytes_a_ray, sum_gradients

if TYPE_CHECKING:
    from ns_multigpu.plugin.radiance.config import RadianceTrainerConfig

Measured = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


class RadianceTrainer(Trainer):
    """Trains with all ranks of the world that the launcher described.

    Differs from nerfstudio's in that ranks move in lockstep, each with its own cells and all with the same rays; only
    gradients of what cells share are exchanged after the backward pass.
    """

    config: "RadianceTrainerConfig"
    pipeline: RadiancePipeline

    def __init__(self, config: "RadianceTrainerConfig", local_rank: int = 0, world_size: int = 1) -> None:
        checks.check_no_accumulation(config.gradient_accumulation_steps)
        self.world = enter_world(config)
        super().__init__(config, local_rank=local_rank, world_size=world_size)
        self.local_rank, self.device = self.world.rank, str(self.world.device)
        # bfloat16 has the range of single precision: no loss has to be scaled, which ranks would have to agree on.
        self.mixed_precision, self.use_grad_scaler = config.mixed_precision, False
        self.grad_scaler = torch.amp.GradScaler(enabled=False)  # type: ignore[assignment]
        self.guards = Guards(config, self.world, "view {}".format, self._last_checkpoint)
        self.guards.numbers.replicated = False
        self.checkpoints = RadianceCheckpoints(config, self.checkpoint_dir, self.world)
        self._chosen = False
        self._fast: FastSteps | None = None  # takes steps in CUDA graphs

    def setup(self, test_mode: Any = "val") -> None:
        """Builds everything; when it returns, every rank is ready to take the first step."""
        with abandoned_unless_begun(self.config), self._explained():
            self._found = self.checkpoints.find()
            assert isinstance(self.config.pipeline, RadiancePipelineConfig)
            self.config.pipeline.cells_of = self._found
            super().setup(test_mode)
            for param in self.pipeline.model.shared_parameters().values():
                broadcast_in_place(param.data, self.world)
            barrier(self.world)

    def setup_optimizers(self) -> Optimizers:
        """As nerfstudio's; and the lock, which nerfstudio hands to its viewer next."""
        self.train_lock = self.pipeline.renders.lock
        return super().setup_optimizers()

    def _load_checkpoint(self) -> None:
        """Goes on from the checkpoint that the flags, or a restart by the launcher, ask for."""
        self._start_step = 0
        if self._found is not None:
            self._start_step = self.checkpoints.resume(self._found, self.pipeline, self.optimizers)

    def train(self) -> None:
        """Runs the steps. Every rank calls it; all leave it after the same step.

        Raises:
            Interrupted: a signal has ended it.
            NonFiniteError: NaN or infinity turned up.
            RanOutOfMemory: a rank has no memory left.
        """
        self.guards.numbers.prepare(self.optimizers.optimizers)
        with self.guards.on_duty(self._circumstances), contextlib.closing(self.pipeline.renders), self._explained():
            self._train()

    def _train(self) -> None:
        if self.world.is_main:
            outputs = self.pipeline.datamanager.train_dataparser_outputs
            outputs.save_dataparser_transform(self.base_dir / "dataparser_transforms.json")
            self._draw_partition()
        self._init_viewer_state()
        self.stop_training = False
        steps, step = self.config.max_num_iterations, self._start_step
        self.step = step - 1
        writer.GLOBAL_BUFFER["step"] = max(self.step, 0)
        with TimeWriter(writer, EventName.TOTAL_TRAIN_TIME):
            while step < steps and self._may_go_on(step):
                self._one_step(step, last=step + 1 == steps)
                step += 1
        if self.guards.signals.agreed:
            self._stop_early()
        self._look_for_nan(now=True)
        self._save_or_fail(self.step)
        self._after_train()

    def _draw_partition(self) -> None:
        """`partition.png`; a disk that takes nothing does not end a run for a picture's sake."""
        file = self.base_dir / "partition.png"
        try:
            self.pipeline.partition_picture(file)
        except OSError as error:
            CONSOLE.print(Text(f"{file} cannot be written: {error}. Training goes on.", "bold yellow"), soft_wrap=True)

    def _may_go_on(self, step: int) -> bool:
        return viewing.may_go_on(self, step)

    def _one_step(self, step: int, last: bool) -> None:
        self.step = step
        with self.train_lock, TimeWriter(writer, EventName.ITER_TRAIN_TIME, step=step) as taken:
            self.pipeline.train()
            self._run_callbacks(step, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
            measured = self.train_iteration(step)
            self._run_callbacks(step, TrainingCallbackLocation.AFTER_TRAIN_ITERATION)
        if step > 1:
            rays = self.pipeline.datamanager.get_train_rays_per_batch()
            rate = rays / max(0.001, taken.duration)
            writer.put_time(EventName.TRAIN_RAYS_PER_SEC, rate, step=step, avg_over_steps=True)
        self._look_for_nan(now=step_check(step, self.config.steps_per_save))
        self._update_viewer_state(step)
        if last or step_check(step, self.config.logging.steps_per_log, run_at_zero=True):
            self._log(step, *measured, taken.duration)
        if step_check(step, self.config.steps_per_checksum):
            assert_identical(self.pipeline.model.shared_parameters(), self.world, step)
        if self.pipeline.datamanager.eval_dataset:
            self.guards.heart.beat("evaluation")
            with self.train_lock:
                self.eval_iteration(step)
        if step_check(step, self.config.steps_per_save):
            self.save_checkpoint(step)
        writer.write_out_storage()

    def train_iteration(self, step: int) -> Measured:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step: all ranks' segments of the same rays, and the update of this rank's cells and of what is shared."""
        model = self.pipeline.model
        if not self._chosen:
            self._choose_steps()
        if self._fast is not None:
            losses, metrics = self._fast.take(step)
            for scheduler in self.optimizers.schedulers.values():
                scheduler.step()
            if step == self._start_step:
                self._refuse_no_rays(step)
            return functools.reduce(torch.add, losses.values()), losses, metrics
        self.optimizers.zero_grad_all()
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.mixed_precision):
            _, losses, metrics = self.pipeline.get_train_loss_dict(step=step)
        self._refuse_no_rays(step)
        loss = functools.reduce(torch.add, losses.values())
        if loss.requires_grad:  # not where no ray of the batch meets this rank's cells
            loss.backward()
        sum_gradients([p for p in model.shared_parameters().values() if p.requires_grad], self.world)
        if self.guards.numbers.watch(step, {}, dict(model.named_parameters()), self.optimizers.optimizers):
            self.optimizers.optimizer_step_all()
        for scheduler in self.optimizers.schedulers.values():
            scheduler.step()
        return loss.detach(), {name: one.detach() for name, one in losses.items()}, metrics

    def _choose_steps(self) -> None:
        """Decides how steps are taken, and says so. Every rank calls it, once all is loaded.

        Raises:
            InputError: steps are to be fused, and cannot be.
        """
        self._chosen = True
        config, model, guard = self.config, self.pipeline.model, self.guards.numbers
        wish, on_gpu = config.fused_steps, self.world.device.type == "cuda"
        reason = "--fused-steps never" if wish == "never" else obstacle(self.pipeline, self.optimizers, self.world)
        if wish == "always" and reason and (on_gpu or model.fixed is None):
            raise InputError(
                f"--fused-steps always: steps cannot be captured, for {reason}. Change that, or use --fused-steps auto."
            )
        if not reason:
            feed = self.pipeline.datamanager.feed()
            assert feed is not None, "asked before: see `obstacle`"
            self._fast = FastSteps(
                self.pipeline, self.optimizers, self.world, guard, skips=config.on_nonfinite == "skip",
                mixed=self.mixed_precision, feed=feed, graphs=GraphsByKind(self.world.device, self._say),
            )  # fmt: skip
            self._say("Steps are captured in CUDA graphs.")
        elif on_gpu or wish == "never":
            model.fixed = None
            self._say(f"Steps are taken as they come: {reason}.")

    def _say(self, line: str) -> None:
        if self.world.is_main:
            CONSOLE.print(Text(line), soft_wrap=True)

    def _refuse_no_rays(self, step: int) -> None:
        """Raises an InputError where no ray of a step has met a cell."""
        figures = self.pipeline.model.figures
        assert figures is not None
        if len(figures.segments) == 0:
            raise InputError(
                f"No ray of step {step} meets a cell. With --pipeline.model.disable-scene-contraction True space is "
                "the scene's box alone; the cameras look elsewhere, or --pipeline.model.near-plane and far-plane leave "
                "none of it. Leave the contraction on, or change the dataparser's scene-scale."
            )

    @torch.no_grad()
    def _log(self, step: int, loss: Tensor, losses: dict[str, Tensor], metrics: dict[str, Tensor], took: float) -> None:
        """Writes what a step measured. Every rank calls it at the same steps."""
        del loss
        # Proposals' losses are each rank's own; a regulariser of poses is rank 0's; the others are the same everywhere.
        if "interlevel_loss" in losses:
            own = losses["interlevel_loss"].detach().clone()
            sum_in_place(own, self.world)
            losses = {**losses, "interlevel_loss": own}
        total = functools.reduce(torch.add, losses.values())
        figures = self.pipeline.model.figures
        assert figures is not None
        if self._fast is not None:
            self._refuse_no_rays(step)  # not in each step: it waits for the device
            self.pipeline.model.camera_optimizer.get_metrics_dict(metrics)
        samples = [row[0] for row in all_gather_ints([figures.samples], self.world)]
        if not self.world.is_main:
            return
        rays = max(figures.rays, 1)
        naive, sent = bytes_a_ray(rays, len(figures.segments), sum(samples), self.pipeline.model.family.width)
        more = {
            "segments_a_ray": len(figures.segments) / rays,
            "rays_outside": float(figures.outside),
            "samples_a_ray": sum(samples) / rays,
            "samples_imbalance": balance(samples),
            "bytes_a_ray": sent,
            "bytes_a_ray_of_samples": naive,
        }
        writer.put_scalar(name="Train Loss", scalar=total, step=step)
        writer.put_dict(name="Train Loss Dict", scalar_dict=losses, step=step)
        writer.put_dict(name="Train Metrics Dict", scalar_dict=metrics, step=step)
        writer.put_dict(name="Cells", scalar_dict=more, step=step)
        row = {"step": step, "loss": float(total), "psnr": float(metrics["psnr"]), "ms": 1e3 * took}
        with (self.base_dir / "metrics.jsonl").open("a", encoding="utf8") as file:
            file.write(json.dumps({**row, **more, "samples_by_rank": samples}) + "\n")

    def save_checkpoint(self, step: int) -> None:
        """Writes a checkpoint with all ranks together, whole or not at all. If the disk is full, training goes on."""
        self.guards.heart.beat("checkpoint")
        if problem := self.checkpoints.save(step, self.pipeline, self.optimizers):
            line = f"The checkpoint after step {step} could not be written: {problem}. Training goes on."
            CONSOLE.print(Text(line, "bold yellow"), soft_wrap=True)

    def _save_or_fail(self, step: int) -> None:
        self.guards.heart.beat("checkpoint")
        if problem := self.checkpoints.save(step, self.pipeline, self.optimizers):
            raise SaveFailed(
                f"The last checkpoint, after step {step}, could not be written to {self.checkpoint_dir}: {problem}. "
                "Make room there, and go on from the newest checkpoint."
            )

    def _stop_early(self) -> None:
        """Saves, where asked to, and leaves: a signal has ended the run, after the same step on every rank."""
        taken = self.step if self.step >= self._start_step else None
        saved: Path | None = None
        if taken is not None and self.config.save_on_interrupt:
            self._look_for_nan(now=True)
            self.save_checkpoint(taken)
            file = self.checkpoint_dir / f"step-{taken:09d}.ckpt"
            saved = file if file.exists() else None
        command = resume_command(str(self.config.method_name), self.base_dir, self.checkpoint_dir)
        raise self.guards.interrupted(taken, saved, self.checkpoint_dir, command)

    def _after_train(self) -> None:
        """Says how it went, and keeps the viewer open if there is one. Every rank calls it."""
        barrier(self.world)
        self.training_state = "completed"
        writer.write_out_storage()
        self._say_goodbye()
        self._run_callbacks(self.step, TrainingCallbackLocation.AFTER_TRAIN)
        if not self.config.viewer.quit_on_train_completion:
            viewing.stay_open(self)

    def _say_goodbye(self) -> None:
        model = self.pipeline.model
        assert model.partition is not None
        CONSOLE.print(
            f"{self.step + 1:,} steps, {model.partition.cells} cells on {self.world.size} worker(s). Look at it with "
            f"ns-viewer --load-config {self.base_dir / 'config.yml'}, measure it with ns-eval.",
            soft_wrap=True,
        )

    def _run_callbacks(self, step: int, location: TrainingCallbackLocation) -> None:
        for callback in self.callbacks:
            callback.run_callback_at_location(step, location=location)

    def _look_for_nan(self, *, now: bool) -> None:
        if self.guards.numbers.due(self.step, now=now):
            self.guards.numbers.look(self.step, dict(self.pipeline.model.named_parameters()), now=now)

    def _last_checkpoint(self) -> str:
        return str(next(reversed(checkpoints_in(self.checkpoint_dir)), ""))

    def _circumstances(self) -> memory.Circumstances:
        return memory.Circumstances(self.world.rank, max(self.step, 0), None, 1, None, self.world.device, "")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says of a lack of memory in what is enclosed what to change.

        Raises:
            RanOutOfMemory: instead of the allocator's error.
        """
        try:
            yield
        except Exception as error:
            where = memory.where_memory_ran_out(error)
            if where is None:
                raise
            pipeline = self.config.pipeline
            assert isinstance(pipeline, RadiancePipelineConfig)
            data, model = pipeline.datamanager, pipeline.model
            raise RanOutOfMemory(
                f"Rank {self.world.rank} has no {'GPU' if where == 'device' else 'host'} memory left in step "
                f"{max(self.step, 0)}. Use more GPUs (each then has fewer cells), fewer rays "
                f"(--pipeline.datamanager.train-num-rays-per-batch {data.train_num_rays_per_batch // 2}), "
                f"smaller grids (--pipeline.model.log2-hashmap-size {model.log2_hashmap_size - 1}), or, in evaluation, "
                "--pipeline.model.eval-num-rays-per-chunk. The newest checkpoint: "
                f"{self._last_checkpoint() or 'none'}."
            ) from error
