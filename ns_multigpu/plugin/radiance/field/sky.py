"""A colour for each direction, behind all cells: what shows through where nothing is in the way."""

from nerfstudio.field_components.encodings import SHEncoding
from nerfstudio.field_components.mlp import MLP
from torch import Tensor, nn

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.radiance.field.draws import drawn

_SKY = 5
"""First number of the seeds of its parameters."""
_LEVELS, _WIDTH = 3, 32
"""Degrees of harmonics of a direction, and neurons. Few: what has detail is to be found in space."""


class Sky(nn.Module):
    """A small network from a direction's spherical harmonics to a colour, which all cells share.

    It is not a part of space, so no cell can paint it for one view alone, as it can its own last samples.

    Args:
        seed: of the run: what its parameters are drawn from.
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
        """`forward`, with a gradient on rank 0 alone: each rank has the loss of all rays, and gradients are summed."""
        colours = self(directions)
        return colours if world.is_main else colours.detach()

    def forward(self, directions: Tensor) -> Tensor:
        """[R, 3] the colours, from 0 to 1, of directions [R, 3] of length 1."""
        return self.network(self.encoding(directions))
