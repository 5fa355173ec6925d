"""Background colours behind all cells: those of nerfstudio's `RGBRenderer`, a ray's mean, and a learned sky."""

from typing import Any

import torch
from nerfstudio.field_components.encodings import SHEncoding
from nerfstudio.field_components.mlp import MLP
from nerfstudio.model_components import renderers
from nerfstudio.utils import colors
from torch import Tensor, nn

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.radiance.field.draws import drawn

_LEARNED = ("last_sample", "random", "sky", "mean")
"""Names of backgrounds that are no fixed colour; behind true pixels they count as black."""

_LEAST_OPAQUE = 0.02
"""Minimum opacity in the division for a ray's mean colour: nearly empty rays stay dark, with small gradients."""

_SKY = 5
"""First seed number of the sky's parameters."""
_LEVELS, _WIDTH = 3, 32
"""Degrees of direction harmonics, and neurons. Few, so that detail is learned in space."""

_SENT: dict[tuple[str, torch.device], Tensor] = {}
"""Each colour is copied to a device once."""


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


class Sky(nn.Module):
    """Background colour of each direction: a small network of its spherical harmonics, which all cells share.

    It depends on directions only, so that no cell can overfit it to one view, as it can its own last samples.

    Args:
        seed: the run's seed, of its parameters.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.encoding = SHEncoding(levels=_LEVELS, implementation="torch")
        with drawn("cpu", seed, _SKY):
            self.network = MLP(
                self.encoding.get_out_dim(), num_layers=2, layer_width=_WIDTH, out_dim=3,
                out_activation=nn.Sigmoid(), implementation="torch",
            )  # fmt: skip

    def behind(self, directions: Tensor, world: World) -> Tensor:
        """Evaluate `forward` with a gradient on rank 0 only: every rank has the loss of all rays, and gradients are
        summed."""
        colours = self(directions)
        return colours if world.is_main else colours.detach()

    def forward(self, directions: Tensor) -> Tensor:
        """Return the colours [R, 3], from 0 to 1, of unit directions [R, 3]."""
        return self.network(self.encoding(directions))
