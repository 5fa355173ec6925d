"""Losses of points besides the image's: depth, normal maps, and for 2D Gaussians normals and distortion; and options
that a primitive does not support."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from ns_multigpu.core.assign.balanced_views import NEAR
from ns_multigpu.core.types import Pixels, View
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.registry import PRIMITIVES
from ns_multigpu.primitives.surfels.losses import TERMS

if TYPE_CHECKING:
    from ns_multigpu.plugin.model.options import SplatModelConfig

SURFACES = "2dgs"
"""Primitive with channels, and losses of them."""
DEPTH = "depth"
"""Name of the depth loss, which all primitives can have. It is no channel."""
NORMAL_MAP = "normal_map"
"""Name of the loss of normal maps: of the channel "normals" of 2D Gaussians, of the depth of others."""


def weights(options: "SplatModelConfig", step: int) -> dict[str, float]:
    """Return the weights of the losses of a step that begins after `step` images, by loss."""
    asked = {DEPTH: (options.depth_loss, options.depth_loss_start), NORMAL_MAP: (options.normal_map_loss, 0)}
    if options.primitive == SURFACES:
        asked["normals"] = (options.normal_loss, options.normal_loss_start)
        asked["distortion"] = (options.distortion_loss, options.distortion_loss_start)
    return {name: weight for name, (weight, start) in asked.items() if weight > 0 and step >= start}


def of_depth(options: "SplatModelConfig") -> dict[str, str]:
    """Return the losses of drawn depth, and the name of each one's weight in `StepSettings`."""
    found = {DEPTH: "depth_weight", NORMAL_MAP: "normal_weight"}
    return {DEPTH: found[DEPTH]} if options.primitive == SURFACES else found


def channels(options: "SplatModelConfig", counted: Mapping[str, float]) -> tuple[str, ...]:
    """Return the channels that losses are of."""
    names = ("normals" if name == NORMAL_MAP else name for name in counted if name not in of_depth(options))
    return tuple(dict.fromkeys(names))


def add_shares(losses: dict[str, Tensor], counted: Mapping[str, float], pixels: Pixels, view: View, views: int) -> None:
    """Add a patch's share of the mean over `views` views to each active loss in `losses`."""
    for name, weight in counted.items():
        key = loss_name(name)
        losses[key] = losses[key] + weight * TERMS[name](pixels, view) / views


def loss_name(of: str) -> str:
    """Return the name in logs of the loss of a channel, or of depth."""
    return f"{of}_loss"


def check_primitive(options: "SplatModelConfig", strategy: str) -> None:
    """Check that the primitive supports the options.

    Raises:
        InputError: it does not; the message says why, and what to do.
    """
    kind = PRIMITIVES[options.primitive]
    for (name, value), why in kind.lacks.items():
        if getattr(options, name) == value:
            raise InputError(
                f"--pipeline.model.{name.replace('_', '-')} {value} is not for {kind.title} "
                f"(--pipeline.model.primitive {options.primitive}): {why}."
            )
    if not 0 <= options.sh_degree <= 3:
        raise InputError(f"--pipeline.model.sh-degree {options.sh_degree}: give 0 to 3.")
    if options.far_plane is not None and not options.far_plane > NEAR:
        raise InputError(
            f"--pipeline.model.far-plane {options.far_plane}: give a depth above that of the near plane, {NEAR}."
        )
    if not 0 <= options.radius_clip < float("inf"):
        raise InputError(f"--pipeline.model.radius-clip {options.radius_clip}: give 0 pixels or more.")
    of_channels = ("normal_loss", "distortion_loss", "normal_map_loss") if options.primitive == SURFACES else ()
    for name in dict.fromkeys(("depth_loss", "normal_map_loss", "sky_loss", *of_channels)):
        option, value = f"--pipeline.model.{name.replace('_', '-')}", getattr(options, name)
        if not 0 <= value < float("inf"):
            raise InputError(f"{option} {value}: give a weight of 0 or more.")
        if value > 0 and name in of_channels and strategy == "pixel":
            raise InputError(
                f"{option} {value}: with the strategy pixel, images are put together of cells' layers, which have "
                f"colour, alpha and depth, and nothing that this loss is of. Add {option} 0, or use another strategy."
            )
