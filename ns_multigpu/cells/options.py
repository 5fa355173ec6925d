"""User options of `pixel`."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class PixelOptions:
    """Options of the strategy `pixel`."""

    cells: int = 0
    """Cells that space is cut into, distributed to GPUs in runs; 0 for one a GPU. What is trained depends on it, and on
    the number of GPUs only through it."""
    imbalance: float = 1.2
    """Cells are rebuilt when the work of one is more than this times the mean; above 1."""

    wire: Literal["full", "half"] = "full"
    """Type of pixels and their gradients on the wire: "full" is float32 and changes nothing; "half" is float16 and
    rounds pixels of other GPUs."""

    level_steps: bool = True
    """Views that show different cells come into one step, so that GPUs have level work; False leaves the order of views
    that other strategies have. It makes no difference with one view a step."""

    crossing: Literal["none", "ghosts"] = "ghosts"
    """Splats that overlap another cell: "none" draws them with their own cell, so that the image depends on the
    cells; "ghosts" sends them to the GPUs of the cells that they overlap, and all is blended by depth as one GPU does
    it."""

    hide: bool = False
    """Do not draw a cell in the part of a view where less than 1/1000 of what is seen arrived when the view was drawn
    last. Visibility is measured each time. It sends less, and may cost quality."""

    def problem(self) -> str | None:
        """Return the error in the values with its remedy; None if there is none."""
        if self.cells < 0:
            return f"cells {self.cells}: give at least one for each GPU, or 0 for just one each"
        if not self.imbalance > 1:
            return f"imbalance {self.imbalance}: give a factor above 1, such as 1.2"
        return None
