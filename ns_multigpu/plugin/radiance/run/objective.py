"""The objective of `nerfacto-xl`: a radiance field in cells, sharded over ranks that all have the same rays."""

import functools
from pathlib import Path

import torch
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text
from torch import Tensor

from ns_multigpu.plugin.blocks.fused_blocks import Measured
from ns_multigpu.plugin.checkpoint.atomic_save import Opened
from ns_multigpu.plugin.checkpoint.training_copy import Content
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.radiance.field.figures import log_entry, refuse_no_rays
from ns_multigpu.plugin.radiance.run.fast_steps import FastSteps, obstacle
from ns_multigpu.plugin.radiance.run.field_state import field_content, resume_field
from ns_multigpu.plugin.radiance.run.pipeline import RadiancePipeline
from ns_multigpu.plugin.radiance.run.step_graphs import GraphsByKind
from ns_multigpu.plugin.run.objective import LogEntry, Objective, Resumed
from ns_multigpu.radiance.exchange import sum_gradients


class RadianceObjective(Objective):
    """See `Objective`; `config` is a `RadianceTrainerConfig`, `pipeline` a `RadiancePipeline`."""

    unit = "rays"
    pipeline: RadiancePipeline
    optimizers: Optimizers
    fast: FastSteps | None = None
    """Runs steps of fixed shapes, in CUDA graphs; None to run them eagerly."""
    _first = 0

    def build_optimizers(self) -> Optimizers:
        """See `Objective.build_optimizers`."""
        return Optimizers(self.config.optimizers.copy(), self.pipeline.get_param_groups())

    def prepare(self) -> None:
        """See `Objective.prepare`."""
        super().prepare()
        self.guards.numbers.replicated = False

    def begin(self, first: int) -> None:
        """See `Objective.begin`."""
        self._first = first
        torch.backends.cuda.matmul.allow_tf32 = True  # products in TF32, sums in float32
        config, model, guard = self.config, self.pipeline.model, self.guards.numbers
        guard.prepare(self.optimizers.optimizers)
        wish, on_gpu = config.fused_steps, self.world.device.type == "cuda"
        reason = "--fused-steps never" if wish == "never" else obstacle(self.pipeline, self.optimizers, self.world)
        if wish == "always" and reason and (on_gpu or model.fixed is None):
            raise InputError(
                f"--fused-steps always: steps cannot be captured, for {reason}. Change that, or use --fused-steps auto."
            )
        if not reason:
            step_inputs = self.pipeline.datamanager.step_inputs()
            assert step_inputs is not None, "asked before: see `obstacle`"
            graphs = GraphsByKind(self.world.device, self.pipeline.timer, self.guards.computed, _say)
            self.fast = FastSteps(
                self.pipeline, self.optimizers, self.world, guard, skips=config.on_nonfinite == "skip",
                mixed=config.mixed_precision, step_inputs=step_inputs, graphs=graphs,
            )  # fmt: skip
            _say("Steps are captured in CUDA graphs.")
        elif on_gpu or wish == "never":
            model.fixed = None
            _say(f"Steps are taken as they come: {reason}.")

    def step(self, step: int, *, metrics: bool) -> Measured:
        """See `Objective.step`. Each rank renders its own segments of the same rays, and updates its cells and the
        shared parameters."""
        del metrics  # they cost nothing
        with self.pipeline.timer.measure("compute"):
            if self.fast is None:
                losses, measured = self._as_it_comes(step)
            else:
                losses, measured = self.fast.take(step)
            for scheduler in self.optimizers.schedulers.values():
                scheduler.step()
        if self.fast is None or step == self._first:  # not in each captured step: it waits for the device
            refuse_no_rays(self.pipeline.model, step)
        losses, measured = ({name: one.detach() for name, one in some.items()} for some in (losses, measured))
        return functools.reduce(torch.add, losses.values()), losses, measured

    def _as_it_comes(self, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run a step eagerly through autograd; return losses and metrics by name."""
        model = self.pipeline.model
        self.optimizers.zero_grad_all()
        # bfloat16 has the range of single precision: losses need no scale that ranks would have to agree on.
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.mixed_precision):
            _, losses, measured = self.pipeline.get_train_loss_dict(step=step)
        loss = functools.reduce(torch.add, losses.values())
        if loss.requires_grad:  # False if no ray of the batch meets this rank's cells
            loss.backward()
        sum_gradients(model.summed_parameters(), self.world)
        if self.guards.numbers.watch(step, {}, dict(model.named_parameters()), self.optimizers.optimizers):
            self.optimizers.optimizer_step_all()
        return losses, measured

    def replicated(self) -> dict[str, Tensor]:
        """See `Objective.replicated`."""
        return dict(self.pipeline.model.shared_parameters())

    def follow_placement(self, folder: Path) -> None:
        """See `Objective.follow_placement`: cells never move. A full disk only prints a warning."""
        if self.world.is_main:
            self.pipeline.partition_picture(folder)

    @property
    def units_per_step(self) -> int:
        """See `Objective.units_per_step`."""
        return self.pipeline.config.datamanager.train_num_rays_per_batch

    rays_per_step = units_per_step

    def log(self, measured: Measured) -> LogEntry:
        """See `Objective.log`."""
        if self.fast is not None:
            refuse_no_rays(self.pipeline.model, self.pipeline.model.step)
        rates = {name: scheduler.get_last_lr()[0] for name, scheduler in self.optimizers.schedulers.items()}
        return log_entry(self.pipeline, measured, rates)

    def size(self) -> dict[str, int]:
        """See `Objective.size`."""
        assert self.pipeline.model.partition is not None
        return {"cells": self.pipeline.model.partition.cells}

    def lost(self, steps: int) -> tuple[str, int]:
        """See `Objective.lost`: each parameter has two moments."""
        model = self.pipeline.model
        own, shared = (sum(p.nbytes for p in some.values()) for some in (model.own_parameters(), self.replicated()))
        needed = 3 * (own * self.world.size + shared)
        return f"the field after {steps:,} steps ({self.pipeline.described}, {needed / 1e6:,.0f} MB)", needed

    def content(self, step: int) -> Content:
        """See `Objective.content`."""
        return field_content(step, self.pipeline, self.optimizers)

    def resume(self, opened: Opened) -> Resumed:
        """See `Objective.resume`; cells are distributed over any number of ranks, unchanged."""
        return resume_field(opened, self.pipeline, self.optimizers, self.config, self.world)


def _say(line: str) -> None:
    CONSOLE.print(Text(line), soft_wrap=True)
