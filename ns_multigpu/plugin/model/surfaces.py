"""The losses that 2D Gaussians may have besides the image's; and which options a kind of point has no use for."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from ns_multigpu.core.types import Pixels, View
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.registry import KINDS
from ns_multigpu.primitives.surfels.losses import TERMS

if TYPE_CHECKING:
    from ns_multigpu.plugin.model.options import SplatModelConfig

SURFACES = "2dgs"
"""The kind of point that has these channels."""


def weights(options: "SplatModelConfig", step: int) -> dict[str, float]:
    """The weights of the losses that count in a step that begins after `step` images, by their channels."""
    if options.primitive != SURFACES:
        return {}
    asked = {
        "normals": (options.normal_loss, options.normal_loss_start),
        "distortion": (options.distortion_loss, options.distortion_loss_start),
    }
    return {name: weight for name, (weight, start) in asked.items() if weight > 0 and step >= start}


def add_shares(losses: dict[str, Tensor], counted: Mapping[str, float], pixels: Pixels, view: View, views: int) -> None:
    """Adds a patch's share of the mean over `views` views to `losses`, where each loss that counts is."""
    for name, weight in counted.items():
        key = loss_name(name)
        losses[key] = losses[key] + weight * TERMS[name](pixels, view) / views


def loss_name(channel: str) -> str:
    """Of the loss of a channel, in logs."""
    return f"{channel}_loss"


def check_primitive(options: "SplatModelConfig", strategy: str) -> None:
    """Whether the kind of point can do what the options ask for.

    Raises:
        InputError: it cannot; the message says why, and what to do.
    """
    kind = KINDS[options.primitive]
    for (name, value), why in kind.lacks.items():
        if getattr(options, name) == value:
            raise InputError(
                f"--pipeline.model.{name.replace('_', '-')} {value} is not for {kind.title} "
                f"(--pipeline.model.primitive {options.primitive}): {why}."
            )
    if options.primitive != SURFACES:
        return
    for name in ("normal_loss", "distortion_loss"):
        option, value = f"--pipeline.model.{name.replace('_', '-')}", getattr(options, name)
        if not 0 <= value < float("inf"):
            raise InputError(f"{option} {value}: give a weight of 0 or more.")
        if value > 0 and strategy == "pixel":
            raise InputError(
                f"{option} {value}: with the strategy pixel, images are put together of cells' layers, which have "
                f"colour, alpha and depth, and nothing that this loss is of. Add {option} 0, or use another strategy."
            )
