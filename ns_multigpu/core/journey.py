# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Rows that travel in stages, differentiably: `Leave` packs them, and `Land` is where those of one stage arrive.

Gradients go the other way. As soon as a stage's are known, they are sent off in the way back of its `Land`; in that of
`Leave`, which comes last, all are waited for and added up. The way back of the last stage's `Land` comes first on every
rank, also on one that draws nothing of it: each passes a token to the next.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.half_rows import HalfGradients, HalfRows
from ns_multigpu.core.row_routes import Flight, Route, landed, packed, unpacked
from ns_multigpu.core.world import World


class Journey:
    """The rows of one step on their way, and their gradients.

    Args:
        routes: of each stage.
        halves: the rows' names, if they are to be halves on the wire.

    Attributes:
        probe: columns of the probe that travels with them, if one does.
    """

    def __init__(self, routes: Sequence[Route], world: World, halves: Sequence[str] | None) -> None:
        self.routes, self.world, self._halves = routes, world, halves
        self._rows, self._shapes = torch.empty(0), list[torch.Size]()
        self._there: list[Flight[Tensor]] = []
        self._back: list[Flight[None]] = []
        self._total, self._count = torch.empty(0), 0
        self.probe: int | None = None

    def pack(self, rows: Sequence[Tensor]) -> None:
        """Takes [M, ...] rows."""
        self._rows, self._shapes = packed(rows), [row.shape[1:] for row in rows]
        self._count = len(self._rows)

    def begin(self, stage: int) -> None:
        """Sends a stage's rows off."""
        widths = [shape.numel() for shape in self._shapes]
        code = None if self._halves is None else HalfRows(self._halves, widths)
        self._there.append(self.routes[stage].there(self._rows, self.world, code))
        next(self._there[-1])

    def land(self, stage: int) -> list[Tensor]:
        """Waits for a stage's rows: [K, ...]."""
        arrived = landed(self._there.pop(0))
        if stage + 1 == len(self.routes):
            self._rows = self._rows[:0]  # its memory is the drawing's
        return unpacked(arrived, self._shapes)

    def give_back(self, stage: int, grads: Sequence[Tensor]) -> None:
        """Sends the gradients [K, ...] of a stage's rows off."""
        columns = packed(grads)
        if not self._back:
            self._total = columns.new_zeros(self._count, columns.shape[1])
        code = None if self._halves is None else HalfGradients([grad.shape[1:].numel() for grad in grads])
        self._back.append(self.routes[stage].back(columns, self._total, self.world, code))
        next(self._back[-1])

    def sums(self) -> Tensor:
        """Waits for all gradients: [M, columns], what came back for each row."""
        for flight in self._back:
            landed(flight)
        self._back.clear()
        total, self._total = self._total, torch.empty(0)
        return total


class Leave(torch.autograd.Function):
    """A probe and differentiable rows -> an empty ticket for each stage, and a first token."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, probe: Tensor | None, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.journey = journey
        ctx.shapes = [row.shape[1:] for row in ([] if probe is None else [probe]) + list(rows)]
        ctx.probed = probe is not None
        journey.probe = None if probe is None else probe.shape[1]
        journey.pack(rows)
        return tuple(rows[0].new_empty(0) for _ in range(len(journey.routes) + 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = unpacked(ctx.journey.sums(), ctx.shapes)
        return None, *(back if ctx.probed else [None, *back])


class Land(torch.autograd.Function):
    """A stage's ticket, and the token of the one before -> a token, a probe if there is one, and rows that arrived."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, stage: int, ticket: Tensor, token: Tensor) -> tuple[Any, ...]:
        ctx.journey, ctx.stage = journey, stage
        arrived = journey.land(stage)
        # A probe is zero everywhere: only its gradient has to travel.
        probe = None if journey.probe is None else arrived[0].new_zeros(len(arrived[0]), journey.probe)
        return token.new_empty(0), probe, *arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, probe, *rows = grads
        ctx.journey.give_back(ctx.stage, rows if ctx.journey.probe is None else [probe, *rows])
        return None, None, rows[0].new_zeros(0), rows[0].new_zeros(0)
