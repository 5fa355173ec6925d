"""Trained parameters of a model's training views: gains or bilateral grids, and pose corrections."""

from collections.abc import Mapping
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


def in_steps(model: Any, moments: Mapping[str, tuple[Tensor, Tensor]], views: int, world: World | None) -> OfViews:
    """Return a model's parameters of views as fused steps take them.

    Args:
        moments: Adam's, by the name of their optimizer. views: of a batch. world: see `StepPoses`.
    """
    has, poses = groups(model), None
    if POSES in has:
        config = model.camera_optimizer.config
        penalties = config.trans_l2_penalty, config.rot_l2_penalty
        corrections = model.camera_optimizer.pose_adjustment.detach()
        poses = StepPoses(corrections, *moments[POSES], views, config.mode, penalties, world)
    gains, grids = exposures.GROUP in has, GRIDS in has
    return OfViews(
        exposures=StepExposures(model.exposures.detach(), *moments[exposures.GROUP], views) if gains else None,
        grids=StepGrids(model.bil_grids.grids.detach(), *moments[GRIDS], views) if grids else None,
        poses=poses,
    )
