"""What is counted of a batch of rays in training, for the log."""

from dataclasses import dataclass

from torch import Tensor

from ns_multigpu.radiance.segments import Segments
from ns_multigpu.radiance.slots import Slots


@dataclass(frozen=True)
class Figures:
    """Of the last batch in training.

    Attributes:
        segments: of all cells; `len` says how many. taken: samples on this rank.
        rays: how many there were. outside: [] the part of them that meets no cell.
    """

    segments: Segments | Slots
    taken: int | Tensor
    rays: int
    outside: Tensor

    @property
    def samples(self) -> int:
        """Samples on this rank. May wait for the device."""
        return int(self.taken)
