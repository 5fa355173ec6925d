"""Interface between a trainer and the code that adds and removes points."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class Densifier(Protocol):
    """Rules that add and remove points, the same on every rank. Steps are counted in images seen.

    `params` are the parameters of this rank's points by name, `optimizers` theirs by name, `state` is what
    `initialize_state` returned: changed in place.

    Attributes:
        kind: its name in checkpoints: statistics of another kind are of no use to it.
    """

    kind: ClassVar[str]

    @property
    def noisy(self) -> bool:
        """True if `move` moves all points after each step."""
        ...

    def initialize_state(self) -> dict[str, Any]:
        """Return the state to keep between steps."""
        ...

    def counts(self, images: int) -> bool:
        """Return True if statistics are gathered in a step that begins after so many images."""
        ...

    def statistics(self, params: Any, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return the running sums of `state` by name, [N] each. Creates those that are missing."""
        ...

    def after_step(
        self, params: Any, optimizers: dict[str, torch.optim.Optimizer], state: dict[str, Any], step: int, images: int,
        rate: float, info: Callable[[], Mapping[str, Any]],
    ) -> None:  # fmt: skip
        """Update statistics after a step that used autograd, and refine or reset if due.

        Args:
            step: images seen before it. images: in it.
            rate: the means' learning rate that a step of one image would have.
            info: what `densification_info` returns; asked for where `counts`.
        """
        ...

    def due_after(self, step: int, images: int) -> bool:
        """Return whether a refinement or reset follows a step that sees `images` images from number `step` on."""
        ...

    def replaces(self, params: Any, step: int, images: int) -> bool:
        """Return whether `refine_when_due` may replace tensors (parameters, moments, statistics) after that step.

        The result is the same on every rank. If it is False, only values change, in place.
        """
        ...

    def refine_when_due(
        self, params: Any, optimizers: dict[str, torch.optim.Optimizer], state: dict[str, Any], step: int, images: int
    ) -> None:
        """Refine if due after that step. Its statistics must have been counted."""
        ...

    def refine_ahead(
        self, params: Any, optimizers: dict[str, torch.optim.Optimizer], state: dict[str, Any], step: int, images: int,
        taken: Tensor,
    ) -> bool:  # fmt: skip
        """Launch what `refine_when_due` would do after a step of which only the device knows whether it was taken.

        Args:
            taken: [] bool on the device; nothing happens there where it is False.

        Returns:
            whether it has: not where it is not due, or where something about it must be known here. Of that a part may
            have been ordered; `refine_when_due` then does the rest. The same on every rank.
        """
        ...

    def move(self, params: Any, step: int, images: int, rate: float, taken: Tensor | None = None) -> None:
        """Move all points after a step, if it is `noisy`; `taken` [] is 0 or False to move none."""
        ...

    def limit(self, cap: int | None, held_back: Callable[[int], None]) -> int | None:
        """Keep the whole model within a number of points, unless the densifier has a limit of its own.

        Args:
            cap: that number, None for any.
            held_back: called with the number of points there would have been.

        Returns:
            what limits the model now.
        """
        ...
