"""Colours behind pixels, as nerfstudio's `RGBRenderer` has them, and a ray's own; each is sent to a device once."""

from typing import Any

import torch
from nerfstudio.model_components import renderers
from nerfstudio.utils import colors
from torch import Tensor

_LEARNT = ("last_sample", "random", "sky", "mean")
"""What is no colour; behind true pixels it is black."""

_LEAST_OPAQUE = 0.02
"""The least that a ray's colour is divided by to be its mean: what is hardly there stays dark, its gradient small."""

_SENT: dict[tuple[str, torch.device], Tensor] = {}


def chosen(option: Any, like: Tensor) -> Any:
    """The background that is to be shown: a name, or a colour [3] or [..., 3] on the device of `like`.

    Args:
        option: `background_color`, a name or a colour; what nerfstudio's commands have set for all models overrides it.
    """
    override: Any = renderers.BACKGROUND_COLOR_OVERRIDE
    return option if option in _LEARNT and override is None else colour(option, like)


def colour(option: Any, like: Tensor) -> Tensor:
    """A colour, [3] or [..., 3], by its name or as it is, on the device of `like`. See `chosen`."""
    override: Any = renderers.BACKGROUND_COLOR_OVERRIDE
    option = option if override is None else override
    if isinstance(option, Tensor):
        return option.to(like)
    key = (str(option), like.device)
    if key not in _SENT:
        _SENT[key] = colors.COLORS_DICT[option].to(like)
    return _SENT[key]


def blended(image: Tensor, option: Any) -> Tensor:
    """The colours [..., 3] of an image [..., 3 or 4] on a background; without a fourth channel as they are.

    Args:
        option: as of `chosen`; behind true pixels what is no colour is black. Colours that were drawn at random are
            given themselves.
    """
    if image.shape[-1] < 4:
        return image
    rgb, opacity = image[..., :3], image[..., 3:]
    behind = colour("black" if isinstance(option, str) and option in _LEARNT else option, rgb)
    return rgb * opacity + behind * (1 - opacity)


def mean_colour(colour: Tensor, through: Tensor) -> Tensor:
    """A ray's colour [R, 3] with its own mean behind it, in proportion to what comes `through` [R, 1].

    That is the mean over the ray, weighted by what is seen of each sample. It follows from integrals that all cells
    share. What is far behind counts by how much of it is seen, not for all that is left.
    """
    return colour / (1 - through).clamp_min(_LEAST_OPAQUE)
