"""Nerfstudio's optimizers for batches of views, over parameters that densification replaces."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from nerfstudio.engine.optimizers import Optimizers
from torch.nn import Parameter

from cuda_ext.ops.optim.adam import FusedAdam, fused_step
from cuda_ext.ops.optim.compact_adam import CompactAdam
from ns_multigpu.core.dist.collectives import sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.model.batch_scaling import RateSchedule, scale_optimizer, scaled_scheduler


class BatchOptimizers(Optimizers):
    """Optimizers and schedulers by parameter group, scaled for the views of a step and the length of a run.

    Args:
        config: see nerfstudio's.
        param_groups: see nerfstudio's.
        rate_schedule: schedule of learning rates; kept as an attribute.
        fused: use our fused Adam instead of torch's on a CPU too; on a GPU it is always used.
        compact: groups whose Adam keeps its moments as bfloat16, if it is ours.
        spread: groups of which every rank holds only its shard, and the ranks.

    Raises:
        InputError: an optimizer or scheduler cannot follow the batch.
    """

    def __init__(
        self,
        config: dict[str, Any],
        param_groups: dict[str, list[Parameter]],
        rate_schedule: RateSchedule,
        *,
        fused: bool = False,
        compact: Sequence[str] = (),
        spread: Mapping[str, World] | None = None,
    ) -> None:
        self._spread = spread or {}
        ours = {
            name: _fused(group, param_groups.get(name, []), fused, CompactAdam if name in compact else FusedAdam)
            for name, group in config.items()
        }
        super().__init__(ours, param_groups)
        self.rate_schedule = rate_schedule
        # The mean gradient of B nearly independent views is shorter than one view's by sqrt(B): so is the limit.
        self._norm_factor = 1.0 if rate_schedule.rule == "none" else rate_schedule.batch**-0.5
        for name, optimizer in self.optimizers.items():
            scale_optimizer(optimizer, rate_schedule)
            if scheduler := scaled_scheduler(optimizer, self.schedulers.get(name), rate_schedule):
                self.schedulers[name] = scheduler

    def rate_of_one_view(self, group: str) -> float:
        """Return a group's present learning rate for one view per step."""
        scheduler = self.schedulers.get(group)
        steps = scheduler.last_epoch if scheduler is not None else 0  # without one the factor stays
        # A scheduler's rates are numpy's numbers, which have a way of their own of multiplying tensors.
        return float(self.optimizers[group].param_groups[0]["lr"]) / self.rate_schedule.of_batch(steps)

    @property
    def parameters(self) -> dict[str, list[Parameter]]:
        """Presently optimized parameters. Nerfstudio keeps the initial ones, which lose their gradients."""
        return {
            name: [p for group in optimizer.param_groups for p in group["params"]]
            for name, optimizer in self.optimizers.items()
        }

    @parameters.setter
    def parameters(self, value: Mapping[str, list[Parameter]]) -> None:
        if value:
            raise AttributeError("parameters follow from the optimizers")

    def optimizer_step_all(self) -> None:
        """Clip gradients of groups whose config has a max_norm, then step all optimizers."""
        stepped: list[torch.optim.Optimizer] = []
        for name, optimizer in self.optimizers.items():
            params = self.parameters[name]
            max_norm = self.config[name]["optimizer"].max_norm
            if max_norm is not None:
                clip_gradients(params, max_norm * self._norm_factor, self._spread.get(name))
            # An empty parameter (harmonics of degree 0) has a gradient only where ranks exchange: no step, anywhere.
            if any(p.grad is not None and p.numel() > 0 for p in params):
                stepped.append(optimizer)
        fused_step(stepped)


def clip_gradients(params: Sequence[Parameter], most: float, world: World | None) -> None:
    """Scale gradients down to a norm of `most`, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        params: those whose gradients are clipped together; others have none.
        world: where the ranks hold parts of them, whose norm is that of the whole; every rank calls it. Else None.
    """
    if world is None:
        torch.nn.utils.clip_grad_norm_(params, most)
        return
    gradients = [p.grad for p in params if p.grad is not None]
    squared = sum((g.square().sum() for g in gradients), torch.zeros((), dtype=params[0].dtype, device=world.device))
    sum_in_place(squared, world)
    factor = (most / (squared.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def _fused(group: dict[str, Any], params: Sequence[Parameter], always: bool, kind: type) -> dict[str, Any]:
    """Return a group's config with our Adam instead of torch's, for parameters on GPUs or if `always`."""
    optimizer = group["optimizer"]
    if optimizer._target is not torch.optim.Adam or not (always or any(p.device.type != "cpu" for p in params)):
        return group
    return {**group, "optimizer": replace(optimizer, _target=kind)}
