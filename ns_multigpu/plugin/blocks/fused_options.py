"""Conditions for fused steps, and the ends of their blocks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from cuda_ext.dispatch.load import backend, reference_forced
from cuda_ext.ops.optim.adam import FusedAdam, is_plain
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.fused_support import unsupported_reason
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model import view_parameters
from ns_multigpu.plugin.model.optimizers import BatchOptimizers
from ns_multigpu.primitives.registry import FIRST, titled

if TYPE_CHECKING:
    from ns_multigpu.plugin.run.config import RunConfig
    from ns_multigpu.plugin.splats.config import DistributedTrainerConfig
    from ns_multigpu.plugin.splats.pipeline import DistributedPipeline

_MOST_VIEWS, _MOST_LENS_VIEWS = 128, 96


def fuses(
    config: "DistributedTrainerConfig", pipeline: "DistributedPipeline", optimizers: BatchOptimizers, world: World
) -> tuple[bool, str]:
    """Return whether this run's steps are fused, the same on every rank, and a message about it.

    Args:
        config: a `DistributedTrainerConfig`.
        pipeline: its pipeline. optimizers: its `BatchOptimizers`.

    Raises:
        InputError: steps must be fused and cannot be, or are not fused although the optimizer's state is compact.
    """
    yes, reason = _decided(config, pipeline, optimizers, world)
    options = pipeline.model.config
    if not yes and options.optimizer_state == "compact":
        raise InputError(
            "--pipeline.model.optimizer-state compact: only fused steps keep Adam's moments in bfloat16, and steps are "
            f"not fused: {reason}. Change that, or leave the option out: the optimizer's state is full then."
        )
    if yes:
        return True, "Steps are fused."
    # On a CPU, unfused steps are the default and need no message.
    speaks = config.fused_steps == "never" or _on_gpu(world) or options.primitive != FIRST
    return False, f"Steps are not fused: {reason}." if speaks else ""


def _decided(
    config: "DistributedTrainerConfig", pipeline: "DistributedPipeline", optimizers: BatchOptimizers, world: World
) -> tuple[bool, str]:
    """Return whether steps are fused, and the reason if they are not."""
    if config.fused_steps == "never":
        return False, "--fused-steps never"
    if config.fused_steps == "auto" and not _on_gpu(world):
        return False, "on a CPU they are only with --fused-steps always"
    reason = obstacle(config, pipeline, optimizers)
    if reason is None and not _on_gpu(world) and backend() == "reference":
        reason = "this CPU has no compiled operators (no C++ compiler, or NS_MULTIGPU_OPS=reference)"
    if config.fused_steps == "always":
        if reason is not None:
            raise InputError(
                f"--fused-steps always: steps cannot be fused, for {reason}. Change that, or use --fused-steps auto."
            )
        return True, ""
    if reason is None and reference_forced():
        reason = "NS_MULTIGPU_OPS=reference switches our kernels off"
    return reason is None, reason or ""


def _on_gpu(world: World) -> bool:
    device = world.device
    return device.type == "cuda" or (device.type == "multigpu" and not torch.ops.multigpu.is_host())


def check_requests(pipeline: "DistributedPipeline", *, fused: bool) -> None:
    """Check that the options for the exchange of rows apply to this run.

    Args:
        pipeline: a `DistributedPipeline`. fused: whether its steps are fused.

    Raises:
        InputError: an option requires fused steps of sharded points, and these steps are others.
    """
    asked = pipeline.config
    is_exchanged = pipeline.model.sharded and pipeline.strategy.pixels.whole
    if fused and is_exchanged:
        if asked.wire == "half" and asked.transport == "peer":
            raise InputError(
                "--pipeline.wire half: that is for collectives, and --pipeline.transport peer asks for peer memory. "
                "Leave out one of the two."
            )
        return
    usual = {
        "transport": ("auto", "collective"), "tile_lists": ("gather",),
        "wire": ("full", "half") if is_exchanged else ("full",),
    }  # fmt: skip
    for name, values in usual.items():
        value = getattr(asked, name)
        if value not in values:
            why = "these are not fused" if is_exchanged else f"the strategy is {pipeline.strategy.name}"
            if name == "wire" and not pipeline.strategy.pixels.whole:
                raise InputError(f"--pipeline.wire {value}: the strategy is pixel. Use --pipeline.pixel.wire {value}.")
            raise InputError(
                f"--pipeline.{name.replace('_', '-')} {value}: that is for the fused steps of splatfacto-tile and "
                f"splatfacto-locality, and "
                f"{why}. Leave it out, or see with --fused-steps always what is in the way."
            )


def obstacle(
    config: "DistributedTrainerConfig", pipeline: "DistributedPipeline", optimizers: BatchOptimizers
) -> str | None:
    """Return the option or property of the capture that prevents fused steps; None if there is none."""
    model, options = pipeline.model, pipeline.model.config
    kernels = model.primitive(depth=False).kernels()
    names = () if kernels is None else (*kernels.parameters, *view_parameters.groups(model))
    groups = [optimizers.optimizers.get(name) for name in names]
    legs = unsupported_reason(pipeline.strategy, pipeline.batch_size)
    tests: Sequence[tuple[bool, Callable[[], str]]] = (
        (legs is not None, lambda: str(legs)),
        (kernels is None, lambda: f"{titled(options.primitive)} have no operators for it"),
        (
            kernels is not None and not kernels.supports_half and pipeline.config.wire == "half",
            lambda: f"rows of {titled(options.primitive)} cross the wire whole, and --pipeline.wire half is asked for",
        ),
        (
            options.use_scale_regularization and options.primitive != FIRST,
            lambda: f"scales of {titled(options.primitive)} are regularised",
        ),
        (
            # torch's engine differentiates tensors of one type of accelerator in a process, which is multigpu there.
            model.means.device.type == "multigpu" and bool(pipeline.observed or options.sky_loss),
            lambda: "on one device of all GPUs they have no losses of depth, of normals and of the sky",
        ),
        (pipeline.batch_size > _MOST_VIEWS, lambda: f"there are more than {_MOST_VIEWS} views a step"),
        (
            _MOST_VIEWS >= pipeline.batch_size > _MOST_LENS_VIEWS and not pipeline.config.datamanager.undistort,
            lambda: f"there are more than {_MOST_LENS_VIEWS} views with lenses a step",
        ),
        (any(not isinstance(group, FusedAdam) for group in groups), lambda: "an optimizer is not Adam"),
        (not all(is_plain(group) for group in groups if group), lambda: "an optimizer has weight decay"),
        (any(optimizers.config[n]["optimizer"].max_norm is not None for n in names), lambda: "gradients are clipped"),
    )
    return next((reason() for failed, reason in tests if failed), None)


def next_stop(config: "RunConfig", step: int, steps: int, *, evaluates: bool) -> int:
    """Return the step before which a block that begins with `step` must end.

    Args:
        config: a `RunConfig`.
        steps: the run's number of steps.
        evaluates: whether there are held-out views.
    """
    periods = [config.logging.steps_per_log, config.steps_per_save]
    periods += [config.steps_per_checksum, config.steps_per_numeric_check]
    if evaluates:
        periods += [config.steps_per_eval_batch, config.steps_per_eval_image, config.steps_per_eval_all_images]
    # Every periodic action follows a multiple of its period, like refinements: ending a block costs milliseconds.
    return min([steps, *(-(-step // period) * period + 1 for period in periods if period > 0)])
