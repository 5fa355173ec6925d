"""Background colour of each direction, behind all cells."""

from nerfstudio.field_components.encodings import SHEncoding
from nerfstudio.field_components.mlp import MLP
from torch import Tensor, nn

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.radiance.field.draws import drawn

_SKY = 5
"""First seed number of its parameters."""
_LEVELS, _WIDTH = 3, 32
"""Degrees of direction harmonics, and neurons. Few, so that detail is learned in space."""


class Sky(nn.Module):
    """Small network from a direction's spherical harmonics to a colour, which all cells share.

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
