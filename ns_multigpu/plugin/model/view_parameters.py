"""Trained parameters of a model's training views: gains or bilateral grids, and pose corrections."""

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.bilateral_grids import StepGrids
from ns_multigpu.core.step.exposures import StepExposures
from ns_multigpu.core.step.poses import StepPoses
from ns_multigpu.plugin.model import exposures

GRIDS, POSES = "bilateral_grid", "camera_opt"
"""Nerfstudio's names of the optimizers of bilateral grids and of pose corrections."""


class OfViews(TypedDict):
    """Arguments of `Step`."""

    exposures: StepExposures | None
    grids: StepGrids | None
    poses: StepPoses | None


def groups(model: Any) -> list[str]:
    """Return the parameter groups of a model's views, in the order in which `Step.scalars` has their Adam."""
    config = model.config
    has = {
        exposures.GROUP: model.exposures is not None, GRIDS: config.use_bilateral_grid,
        POSES: config.camera_optimizer.mode != "off",
    }  # fmt: skip
    return [name for name, there in has.items() if there]


def in_steps(
    model: Any, moments: Mapping[str, tuple[Tensor, Tensor]], views: int, world: World | None,
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> OfViews:  # fmt: skip
    """Return a model's parameters of views as fused steps take them.

    Args:
        moments: Adam's, by the name of their optimizer. views: of a batch. world: see `StepPoses`.
        place: returns what the step has in the place of a parameter or moment.
    """
    has, poses = groups(model), None

    def tensors(group: str, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = moments[group]
        return place(values.detach()), place(first), place(second)

    if POSES in has:
        config = model.camera_optimizer.config
        penalties = config.trans_l2_penalty, config.rot_l2_penalty
        corrections = tensors(POSES, model.camera_optimizer.pose_adjustment)
        poses = StepPoses(*corrections, views, config.mode, penalties, world)
    gains, grids = exposures.GROUP in has, GRIDS in has
    return OfViews(
        exposures=StepExposures(*tensors(exposures.GROUP, model.exposures), views) if gains else None,
        grids=StepGrids(*tensors(GRIDS, model.bil_grids.grids), views) if grids else None,
        poses=poses,
    )
