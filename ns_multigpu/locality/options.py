"""User options of `locality`."""

from dataclasses import dataclass
from typing import Literal

from ns_multigpu.locality.groups import LEAST, MOST

_MOST_PATCHES = 8


@dataclass
class LocalityOptions:
    """Options of the strategy `locality`."""

    patches: int = 4
    """Views are cut into so many patches along each side, 1 to 8; 1 draws whole views."""
    group_size: int = 0
    """Points of a group, which go to one GPU together; 0 for 1024 to 4096 by the size of the model."""
    relays: bool = True
    """A splat that several GPUs of another machine need crosses to it once, and is handed on there. False: once to each
    of them."""
    plans: Literal["auto", "ahead", "at-once"] = "auto"
    """Over several machines: plan coming steps on the CPU while GPUs work, or each step when it comes; "auto" plans
    ahead on GPUs. In one machine plans recur and are made at once."""
    place_again_at: float = 1.5
    """Redistribute points when the model has grown by this factor; above 1."""

    def problem(self) -> str | None:
        """Return the error in the values with its remedy; None if there is none."""
        if not 1 <= self.patches <= _MOST_PATCHES:
            return f"patches {self.patches}: give 1 to {_MOST_PATCHES} along each side of a view"
        if self.group_size != 0 and not LEAST <= self.group_size <= MOST:
            return f"group-size {self.group_size}: give {LEAST} to {MOST} points, or 0 to follow the size of the model"
        if not self.place_again_at > 1:
            return f"place-again-at {self.place_again_at}: give a factor above 1, such as 1.5"
        return None
