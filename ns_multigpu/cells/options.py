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
    """Precision of communication of pixels and their gradients: full (float32) or half (float16)."""

    level_steps: bool = True
    """Views that show different cells come into one step, so that GPUs have level work; False leaves the order of views
    that other strategies have. It makes no difference with one view a step."""

    crossing: Literal["none", "ghosts"] = "ghosts"
    """Splats that overlap another cell. none: drawn with their own cell only, so that the image depends on the cells.
    `ghosts`: sent to the GPUs of all cells that they overlap, which gives the image of one GPU."""

    hide: bool = False
    """Draw a cell only in the part of a view to which it contributed 1/1000 or more when the view was drawn last. Sends
    less, and may cost quality."""

    def problem(self) -> str | None:
        """Return the error in the values with its remedy; None if there is none."""
        if self.cells < 0:
            return f"cells {self.cells}: give at least one for each GPU, or 0 for just one each"
        if not self.imbalance > 1:
            return f"imbalance {self.imbalance}: give a factor above 1, such as 1.2"
        return None
