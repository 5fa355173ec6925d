"""Background colours: those of nerfstudio's `RGBRenderer`, and a ray's mean. Each is copied to a device once."""

from typing import Any

import torch
from nerfstudio.model_components import renderers
from nerfstudio.utils import colors
from torch import Tensor

_LEARNED = ("last_sample", "random", "sky", "mean")
"""Names of backgrounds that are no fixed colour; behind true pixels they count as black."""

_LEAST_OPAQUE = 0.02
"""Minimum opacity in the division for a ray's mean colour: nearly empty rays stay dark, with small gradients."""

_SENT: dict[tuple[str, torch.device], Tensor] = {}


def chosen(option: Any, like: Tensor) -> Any:
    """Return the background to show: a name, or a colour [3] or [..., 3] on the device of `like`.

    Args:
        option: `background_color`, a name or a colour. A global override by nerfstudio's commands has precedence.
    """
    override: Any = renderers.BACKGROUND_COLOR_OVERRIDE
    return option if option in _LEARNED and override is None else colour(option, like)


def colour(option: Any, like: Tensor) -> Tensor:
    """Return a colour, [3] or [..., 3], from its name or tensor, on the device of `like`. See `chosen`."""
    override: Any = renderers.BACKGROUND_COLOR_OVERRIDE
    option = option if override is None else override
    if isinstance(option, Tensor):
        return option.to(like)
    key = (str(option), like.device)
    if key not in _SENT:
        _SENT[key] = colors.COLORS_DICT[option].to(like)
    return _SENT[key]


def blended(image: Tensor, option: Any) -> Tensor:
    """Return the colours [..., 3] of an image [..., 3 or 4] on a background. Images without a fourth channel are
    unchanged.

    Args:
        option: as of `chosen`; named backgrounds without a fixed colour are black. Random colours are a tensor.
    """
    if image.shape[-1] < 4:
        return image
    rgb, opacity = image[..., :3], image[..., 3:]
    behind = colour("black" if isinstance(option, str) and option in _LEARNED else option, rgb)
    return rgb * opacity + behind * (1 - opacity)


def mean_colour(colour: Tensor, through: Tensor) -> Tensor:
    """Blend a ray's colour [R, 3] with its own mean, by its transmittance `through` [R, 1].

    The mean is weighted by each sample's visibility. It follows from integrals that all cells share. Far samples count
    by their visible part only.
    """
    return colour / (1 - through).clamp_min(_LEAST_OPAQUE)
