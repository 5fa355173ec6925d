"""Training loop of one rank, in step with the others."""

import contextlib
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from nerfstudio.engine.callbacks import TrainingCallbackLocation
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.engine.trainer import Trainer
from nerfstudio.utils import writer
from nerfstudio.utils.misc import step_check
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName, TimeWriter
from rich.text import Text

from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.replicas import assert_identical
from ns_multigpu.plugin.blocks.fused_blocks import FusedBlocks, Measured
from ns_multigpu.plugin.blocks.fused_options import next_stop
from ns_multigpu.plugin.capture.coordinate_offset import offset_line, save_transform
from ns_multigpu.plugin.checkpoint.verify import checkpoints_in
from ns_multigpu.plugin.faults import memory
from ns_multigpu.plugin.faults.errors import InputError, SaveFailed
from ns_multigpu.plugin.faults.guards import Guards
from ns_multigpu.plugin.faults.out_of_memory import saving
from ns_multigpu.plugin.faults.signals import STOP
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.launch.commands import resume_command
from ns_multigpu.plugin.launch.machines import enter_world
from ns_multigpu.plugin.launch.run_folder import abandoned_unless_begun
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.render import viewing
from ns_multigpu.plugin.render.evaluation import HeldOut
from ns_multigpu.plugin.run.checkpoints import RunCheckpoints
from ns_multigpu.plugin.run.last_save import save_last
from ns_multigpu.plugin.run.objective import Objective
from ns_multigpu.plugin.run.pipeline import RunPipeline, RunPipelineConfig
from ns_multigpu.plugin.run.progress import ProgressLog
from ns_multigpu.plugin.run.terminal import quiet, say_how_it_went

if TYPE_CHECKING:
    from ns_multigpu.plugin.run.config import RunConfig


_HELD_OUT = 16
"""Maximum number of held-out views in the final evaluation: all of them would take long on a large capture."""


class DistributedTrainer(Trainer):
    """Training loop of one rank, with all ranks of the world that the launcher described.

    It differs from nerfstudio's around a step: ranks run in lockstep, and replicas are
    compared.
    The objective defines a step and what is saved and logged of it (`train.objective`).

    Attributes:
        objective: the objective that is trained.
    """

    config: "RunConfig"
    pipeline: RunPipeline
    objective: Objective

    def __init__(self, config: "RunConfig", local_rank: int = 0, world_size: int = 1) -> None:
        checks.check_no_accumulation(config.gradient_accumulation_steps)
        config.check_precision()
        self.world = enter_world(config)
        with warnings.catch_warnings(), quiet(CONSOLE):  # a renamed torch function, and mixed precision, would warn
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(config, local_rank=local_rank, world_size=world_size)
        # Nerfstudio opens viewers and writers on rank 0 of each machine; and ranks may share a GPU.
        self.local_rank, self.device = self.world.rank, str(self.world.device)
        # No method scales losses (`check_precision`), which ranks would have to agree on.
        self.use_grad_scaler, self.grad_scaler = False, torch.amp.GradScaler(enabled=False)  # type: ignore[assignment]
        self.guards = Guards(self.config, self.world, self._view_name, self._last_checkpoint)
        self.checkpoints = RunCheckpoints(config, self.checkpoint_dir, self.world)

    def setup(self, test_mode: Any = "val") -> None:
        """Build everything; on return every rank is ready for the first step."""
        with abandoned_unless_begun(self.config), self.guards.explained(self._circumstances):
            self._setup(test_mode)

    def _setup(self, test_mode: Any) -> None:
        self._found = self.checkpoints.find()
        cast(RunPipelineConfig, self.config.pipeline).resumed_from = self._found
        super().setup(test_mode)
        self.objective.prepare()
        self.compare_replicas(self._start_step)
        barrier(self.world)

    def _check_viewer_warnings(self) -> None:
        """Print nothing: nerfstudio would say that nothing is evaluated, while the run summary evaluates."""

    def setup_optimizers(self) -> Optimizers:
        """Return the objective's optimizers, built now that the pipeline exists."""
        # Nerfstudio computes progress and remaining time from this.
        self.config = self.config.for_steps(self.config.steps_for(self.pipeline.images_per_step))
        self.objective = self.config.objective()(self.config, self.pipeline, self.world, self.guards)
        self.checkpoints.objective = self.objective
        self.train_lock = self.pipeline.renders.lock  # nerfstudio passes it to its viewer next
        return self.objective.optimizers

    def train(self) -> None:
        """Run the steps. Every rank calls it; all return after the same step.

        Raises:
            Interrupted: a signal has ended it.
            NonFiniteError: NaN or infinity was found.
        """
        self.pipeline.timer.listener = self.guards.heart.beat
        with self.guards.on_duty(self._circumstances), contextlib.closing(self.pipeline.renders), saving(self):
            self._train()

    def _train(self) -> None:
        if self.world.is_main:
            offset = save_transform(self.pipeline.datamanager.train_dataparser_outputs, self.base_dir)
            if any(offset):
                CONSOLE.print(offset_line(offset), soft_wrap=True)
        self._init_viewer_state()
        self.objective.follow_placement(self.base_dir)
        self.progress = ProgressLog(self.world, self.base_dir, self.config.logging.steps_per_log)
        if self.config.eval_at_start:
            self.progress.start_metrics = self.pipeline.get_average_eval_image_metrics(step=self._start_step)
        self.objective.begin(self._start_step)
        fused = self.objective.blocks
        self.progress.restart_clock(self._start_step)
        self.stop_training = False
        self.steps_taken, self._late, self._look_later = 0, list[Callable[[], None]](), False
        steps = self.config.max_num_iterations  # in all, including steps before a resume
        self.step = self._start_step - 1
        # Nerfstudio's terminal log prints it, even if a resumed run has no step left.
        writer.GLOBAL_BUFFER["step"] = max(self.step, 0)
        with TimeWriter(writer, EventName.TOTAL_TRAIN_TIME):
            step, evaluates = self._start_step, bool(self.pipeline.datamanager.eval_dataset)
            while step < steps and self.may_go_on(step):
                if fused is None:
                    block = range(step, step + 1)
                    self._one_step(step, last=step + 1 == steps)
                else:
                    limit = min(step + self.guards.granted, next_stop(self.config, step, steps, evaluates=evaluates))
                    block = fused.training.block(step, limit)
                    self._fused_steps(fused, block, last=block.stop == steps)
                step = block.stop
            self._finish_late()
        self.progress.trained()
        if self.guards.signals.agreed:
            self._finish_progress({})
            self._stop_early()
        self._after_train()

    def _one_step(self, step: int, last: bool) -> None:
        self.step = step
        logs = self._logs(step) or last
        with self.train_lock, TimeWriter(writer, EventName.ITER_TRAIN_TIME, step=step) as train_time:
            self.pipeline.train()
            self.objective.begin_step(step)
            self._run_callbacks(step, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
            loss, losses, metrics = self.train_iteration(step, metrics=logs)
            self._run_callbacks(step, TrainingCallbackLocation.AFTER_TRAIN_ITERATION)
        self.steps_taken += 1
        self._show_speed(step, train_time.duration)
        self._after_steps(step, last, (loss, losses, metrics) if logs else None)
        self._finish_late()

    def _fused_steps(self, fused: FusedBlocks, steps: range, last: bool) -> None:
        """Run the steps of a block, and the actions that follow its last step."""
        self.step = steps[-1]
        logs = self._logs(self.step) or last
        with self.train_lock:
            measured = fused.take(steps, metrics=logs, while_busy=functools.partial(self._meanwhile, steps, last))
        self.steps_taken += len(steps)
        writer.GLOBAL_BUFFER["step"] = self.step  # printed if a signal ends the run
        # It costs a millisecond, so do it only if it is shown, a viewer uses it, or other events are written anyway.
        if self.viewer_state is not None or writer.EVENT_STORAGE:
            self._show_speed(self.step, fused.show_pace(self.step))
        elif logs:
            self._late.append(lambda step=self.step: self._show_speed(step, fused.show_pace(step)))
        self._after_steps(self.step, last, measured, later=True)

    def _meanwhile(self, steps: range, last: bool) -> None:
        """Run the host's tasks while the device is busy with a block of steps. Every rank calls it."""
        self._finish_late()
        if not last:
            viewing.agree_ahead(self, steps.stop)
        if self._look_later:  # it synchronizes with the device, as the end of the block does
            self._look_later = False
            self._look_for_nan(now=True, pending=True)

    def _finish_late(self) -> None:
        """Run the deferred tasks of the previous block. Every rank calls it."""
        late, self._late = self._late, []
        for task in late:
            task()

    def _logs(self, step: int) -> bool:
        return step_check(step, self.config.logging.steps_per_log, run_at_zero=True)

    def _show_speed(self, step: int, seconds: float) -> None:
        if step > 1:
            rate = self.objective.rays_per_step / max(0.001, seconds)
            writer.put_time(EventName.TRAIN_RAYS_PER_SEC, rate, step, avg_over_steps=True)

    def _after_steps(self, step: int, last: bool, measured: Measured | None, *, later: bool = False) -> None:
        """Run the actions after a step or block: finiteness checks, logs, evaluation, checkpoints.

        With `later`, checks that do not precede a checkpoint may be deferred to `_meanwhile`.
        """
        now = last or step_check(step, self.config.steps_per_save)
        self._look_later = later and not now and not self.guards.numbers.unsure and self.guards.numbers.due(step)
        if not self._look_later:
            self._look_for_nan(now=now)
        self._update_viewer_state(step)
        if self.objective.placement_changed:
            with self.progress.paused():
                self.objective.follow_placement(self.base_dir)
        if measured is not None:
            self._late += [self._log(step, measured), writer.write_out_storage]
        if step_check(step, self.config.steps_per_checksum):
            self.compare_replicas(step)
        if self.pipeline.datamanager.eval_dataset:
            self.guards.heart.beat("evaluation")
            with self.train_lock, self.progress.paused():
                self.eval_iteration(step)
        if step_check(step, self.config.steps_per_save):
            self.guards.heart.beat("checkpoint")
            with self.progress.paused():
                self.save_checkpoint(step, background=self.config.save_in_background)
        self.checkpoints.writer.look()
        writer.write_out_storage()

    def train_iteration(self, step: int, *, metrics: bool = False) -> Measured:
        """See `Objective.step`."""
        return self.objective.step(step, metrics=metrics)

    def compare_replicas(self, step: int) -> None:
        """Check that all ranks hold the same replicated parameters.

        Raises:
            ReplicaDivergedError: they differ.
        """
        assert_identical(self.objective.replicated(), self.world, step)

    def save_checkpoint(self, step: int, *, background: bool = False) -> None:
        """Write a checkpoint with all ranks together, atomically. If the disk is full, training goes on."""
        self.checkpoints.save(step, background=background)

    def _load_checkpoint(self) -> None:
        """Resume from the checkpoint that the flags, or a restart by the launcher, name."""
        self._start_step = self.checkpoints.resume(self._found)
        if self._start_step > self.config.max_num_iterations:
            seen, batch = self._start_step * self.pipeline.images_per_step, self.pipeline.images_per_step
            raise InputError(
                f"The checkpoint's run has seen {seen:,.0f} images, and this one is to end after "
                f"{self.config.max_num_iterations * batch:,.0f}: give more by --max-num-images or --max-num-iterations."
            )

    def _run_callbacks(self, step: int, location: TrainingCallbackLocation) -> None:
        for callback in self.callbacks:
            callback.run_callback_at_location(step, location=location)

    def may_go_on(self, step: int) -> bool:
        """Return whether all ranks run `step`, the same on each; while rank 0's viewer pauses, all wait."""
        return viewing.may_go_on(self, step)

    def _stop_early(self) -> None:
        """Save, if requested, and end the run after a signal, after the same step on every rank.

        Raises:
            Interrupted: always.
        """
        taken = self.step if self.steps_taken else None
        saved: Path | None = None
        self.guards.heart.beat("checkpoint")
        self.checkpoints.writer.finish()
        folder = self.base_dir
        if taken is not None and self.config.save_on_interrupt:
            self._look_for_nan(now=True)
            try:
                folder = save_last(self, taken, seconds=0, is_cancelled=lambda: True)  # no time for retries
                saved = folder / self.config.relative_model_dir / f"step-{taken:09d}.ckpt"
            except SaveFailed as error:
                CONSOLE.print(Text(str(error), "bold red"), soft_wrap=True)
        writer.write_out_storage()
        raise self.guards.interrupted(taken, saved, self.checkpoint_dir, self._command_to_go_on(folder))

    def _look_for_nan(self, *, now: bool, pending: bool = False) -> None:
        """Check that all numbers are finite, if it is due or `now`. Called before each save: no file may hold NaN."""
        if self.guards.numbers.due(self.step, now=now):
            params = dict(self.pipeline.model.named_parameters())
            self.guards.numbers.look(self.step, params, now=now, pending=pending)

    def _view_name(self, view: int) -> str:
        names = self.pipeline.datamanager.train_dataset.image_filenames
        return f"view {view} ({names[view].name})"

    def _last_checkpoint(self) -> str:
        return str(next(reversed(checkpoints_in(self.checkpoint_dir)), ""))

    def _circumstances(self) -> memory.Circumstances:
        return self.guards.circumstances(self)

    def _log(self, step: int, measured: Measured) -> Callable[[], None]:
        """Record this rank's measurements; see `ProgressLog.log`. Every rank calls it at the same steps."""
        entry = self.objective.log(measured)
        return self.progress.log(step, self.pipeline.timer, entry, self.checkpoints.writer.measured())

    def _after_train(self) -> None:
        """Save, print the summary and next commands, and keep the viewer open if there is one.

        Raises:
            SaveFailed: the last checkpoint could not be written anywhere.
        """
        self._look_for_nan(now=True)
        self.guards.heart.beat("checkpoint")
        barrier(self.world)
        self.training_state = "completed"
        looks: list[Any] = []  # one entry; None if no view is held out
        folder = self.save_last(self.step, lambda: looks.append(self._look_at_held_out()))
        held_out = looks[0]
        quality = None if held_out is None else (held_out.psnr, held_out.ssim, held_out.views)
        self._finish_progress(dict(zip(("psnr", "ssim", "held_out_views"), quality or (), strict=False)))
        writer.write_out_storage()
        say_how_it_went(self, folder, held_out)
        self._run_callbacks(self.step, TrainingCallbackLocation.AFTER_TRAIN)
        if not self.config.viewer.quit_on_train_completion:
            viewing.keep_open(self)

    def _look_at_held_out(self) -> HeldOut | None:
        """Return the quality of held-out views; None if there are none. Every rank calls it."""
        self.guards.heart.beat("evaluation")
        with self.train_lock:
            found = self.pipeline.held_out_quality(_HELD_OUT)
        run_parts().done("last look at held-out views")
        return found

    def save_last(self, step: int, while_busy: Callable[[], None]) -> Path:
        """Write the final checkpoint, with fallback and retries; return the run folder that holds it.

        Args:
            while_busy: called while it is written.

        Raises:
            SaveFailed: no folder accepted it.
        """
        signals, seconds = self.guards.signals, self.config.save_retry_seconds
        return save_last(
            self, step, seconds=seconds, is_cancelled=lambda: signals.verdict(self.world) == STOP, while_busy=while_busy
        )

    def _finish_progress(self, more: dict[str, Any]) -> None:
        taken, images = self.step + 1 - self._start_step, self.pipeline.images_per_step
        self.progress.finish(taken, images, self.objective.size(), more)

    def _command_to_go_on(self, folder: Path) -> str:
        return resume_command(str(self.config.method_name), folder, folder / self.config.relative_model_dir)
