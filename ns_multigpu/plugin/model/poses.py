"""Pose corrections of a model, one for each training view (`--pipeline.model.camera-optimizer.mode`)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.poses import StepPoses

GROUP = "camera_opt"
"""Nerfstudio's name of the corrections' optimizer."""


def groups(model: Any) -> list[str]:
    """Return the parameter groups of a model's pose corrections."""
    return [] if model.config.camera_optimizer.mode == "off" else [GROUP]


def in_steps(
    model: Any, moments: Mapping[str, tuple[Tensor, Tensor]], views: int, world: World | None
) -> StepPoses | None:
    """Return a model's pose corrections as fused steps take them; None if it has none.

    Args:
        moments: Adam's, by the name of their optimizer. views, world: see `StepPoses`.
    """
    if not groups(model):
        return None
    config = model.camera_optimizer.config
    corrections = model.camera_optimizer.pose_adjustment.detach()
    penalties = config.trans_l2_penalty, config.rot_l2_penalty
    return StepPoses(corrections, *moments[GROUP], views, config.mode, penalties, world)
