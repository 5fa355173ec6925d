"""Training steps of fixed shapes, captured in CUDA graphs, with few waits for the device."""

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

from ns_multigpu.core.dist.collectives import max_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import Collective, Parts, launched
from ns_multigpu.plugin.faults.numerics import NumericGuard, finite_flags
from ns_multigpu.plugin.radiance.data.device_inputs import DeviceInputs
from ns_multigpu.plugin.radiance.data.pinhole_rays import PinholeRays
from ns_multigpu.plugin.radiance.field.figures import Figures
from ns_multigpu.plugin.radiance.field.fixed import why_not
from ns_multigpu.plugin.radiance.field.shape_buckets import KeptShapeBuckets, ShapeBuckets
from ns_multigpu.plugin.radiance.run.step_graphs import GraphsByKind
from ns_multigpu.radiance.exchange import sum_gradients_in_parts
from ns_multigpu.radiance.slots import Slots

T = TypeVar("T")


def obstacle(pipeline: Any, optimizers: Any, world: World) -> str:
    """Return the option, camera or device that prevents graph capture; "" if steps can be captured."""
    model = pipeline.model
    if reason := why_not(model.config, model.integrals):
        return reason
    if world.device.type != "cuda":
        return "there is no GPU"
    if not PinholeRays.fits(pipeline.datamanager.train_dataset.cameras):
        return "cameras that are not perspective ones"
    others = {name for name, one in optimizers.optimizers.items() if type(one) is not torch.optim.Adam}
    return f"the optimizer of {', '.join(sorted(others))}" if others else ""


@torch.no_grad()
def make_capturable(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Make Adam optimizers on a GPU capturable: rates, counts and moments are kept on the device from the first step.
    Called after they are loaded; their schedulers are unchanged."""
    for optimizer in optimizers.values():
        optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
        for group in optimizer.param_groups:
            group["capturable"], group["foreach"], group["fused"] = True, False, True
            for param in group["params"]:
                if not isinstance(group["lr"], Tensor):
                    group["lr"] = torch.full((), float(group["lr"]), device=param.device)
                state = optimizer.state[param]
                if not state:
                    state["step"] = torch.zeros((), device=param.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["step"] = state["step"].to(param.device, torch.float32)


@dataclass(frozen=True)
class StepResults:
    """A step's results on the device.

    Attributes:
        names: of losses, of metrics, and of the parameters that have a gradient.
        report: [n] the losses, the metrics, and for each gradient a number that is finite if all of it is.
        figures: of the batch.
    """

    names: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    report: Tensor
    figures: Figures


class FastSteps:
    """Training steps of one rank, synchronised with the others.

    Args:
        pipeline: a `RadiancePipeline` whose model has fixed shapes. optimizers: nerfstudio's, loaded. world: the ranks.
        guard: receives the gradients' finite flags. skips: True to skip steps with a non-finite gradient.
        mixed: True if networks run in bfloat16. step_inputs: inputs of the steps.
        graphs: captures steps; None to run them eagerly, as on a CPU.
    """

    def __init__(
        self,
        pipeline: Any,
        optimizers: Any,
        world: World,
        guard: NumericGuard,
        *,
        skips: bool,
        mixed: bool,
        step_inputs: DeviceInputs,
        graphs: GraphsByKind | None,
    ) -> None:
        self._pipeline, self._optimizers, self._world, self._guard = pipeline, optimizers, world, guard
        self._skips, self._mixed, self._step_inputs, self._graphs = skips and guard.active, mixed, step_inputs, graphs
        self._buckets: dict[int, KeptShapeBuckets] = {}
        if graphs is not None:
            make_capturable(optimizers.optimizers)

    def take(self, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run a step. Every rank calls it. It waits only for segment counts (with several cells) and for captures.

        Returns:
            losses and metrics by name, [] each, on the device.
        """
        model = self._pipeline.model
        self._step_inputs.send(step)
        kind = self._step_inputs.kind
        model.fixed.numbers(kind[0])
        self._step_inputs.share()
        slots, buckets = None, model.fixed.all_buckets(kind[0])
        if model.fixed.counts:
            slots, counts = self._run(("clip", kind), (), self.clip)
            buckets = self._buckets.setdefault(kind[0], KeptShapeBuckets(kind[0])).of(counts.tolist())
        steps = functools.partial(self.compute, slots, buckets)
        taken = self._run(("step", kind, model.sampling.learns), buckets, steps)
        model.figures = taken.figures
        losses, metrics, graded = taken.names
        report = taken.report.clone()
        numbers = iter(report[: len(losses) + len(metrics)].unbind())
        if self._guard.active:
            self._guard.note([step], [[]], graded, report[None, len(losses) + len(metrics) :])
        return {name: next(numbers) for name in losses}, {name: next(numbers) for name in metrics}

    def _run(self, kind: Hashable, sizes: Hashable, parts: Callable[[], Parts[T]]) -> T:
        return launched(parts()) if self._graphs is None else self._graphs.take_kind(kind, sizes, parts)

    def clip(self) -> Parts[tuple[Slots, Tensor]]:
        """Return `FixedShapes.clipped` of the step's rays. See `compute`."""
        yield from ()  # no collective
        with torch.no_grad():
            return self._pipeline.model.fixed.clipped(self._rays()[0])

    def _rays(self) -> tuple[RayBundle, dict[str, Tensor]]:
        """Return the rays and colours of the step."""
        model = self._pipeline.model
        rays, batch = self._step_inputs.batch()
        rays = model.collider(rays)
        model.camera_optimizer.apply_to_raybundle(rays)
        return rays, batch

    def compute(self, slots: Slots | None, buckets: ShapeBuckets) -> Parts[StepResults]:
        """Run the step on the device: everything is launched, nothing is read back, and no shape depends on values.

        Args:
            slots: of its rays; None to clip them here. buckets: capacities that hold the rays' segments.
        """
        model = self._pipeline.model
        self._optimizers.zero_grad_all()
        rays, batch = self._rays()
        # No cast cache: a capture would freeze the cast weights of its step.
        with torch.autocast(self._world.device.type, torch.bfloat16, enabled=self._mixed, cache_enabled=False):
            slots = model.fixed.clipped(rays)[0] if slots is None else slots
            outputs = yield from model.fixed.parts(rays, slots, buckets)
            metrics = model.pixel_metrics(outputs, batch)
            losses = model.get_loss_dict(outputs, batch, metrics)
        loss = functools.reduce(torch.add, losses.values())
        if loss.requires_grad:  # False if no ray meets this rank's cells
            loss.backward()
        yield from sum_gradients_in_parts(model.summed_parameters(), self._world)
        graded = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.numel()}
        seen = finite_flags(list(graded.values()))
        if self._skips and seen:
            yield from self._skip_nonfinite(torch.stack([one.reshape(()) for one in seen]))
        self._optimizers.optimizer_step_all()
        values = [*losses.values(), *metrics.values(), *seen]
        report = torch.stack([value.detach().float().reshape(()) for value in values])
        return StepResults((tuple(losses), tuple(metrics), tuple(graded)), report, model.figures)

    def _skip_nonfinite(self, numbers: Tensor) -> Parts[None]:
        """Make the optimizers skip the step on all ranks if a number is not finite."""
        bad = (~numbers.isfinite().all()).to(torch.float32)
        if self._world.group is not None:
            yield Collective(lambda: max_in_place(bad, self._world))
        for optimizer in self._optimizers.optimizers.values():
            optimizer.grad_scale, optimizer.found_inf = None, bad
