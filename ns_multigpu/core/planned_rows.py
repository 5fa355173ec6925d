# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Rows that travel with as much room as the plan of the step foresees: what one step needs, others do not send."""

import torch
from torch import Tensor

from ns_multigpu.core.kernels import Kernels
from ns_multigpu.core.pairs import Pairs
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.transports import CollectiveRows
from ns_multigpu.core.world import World


class PlannedRows(CollectiveRows):
    """All-to-all whose segments have the room of `Plan.room`; of a plan that foresees nothing, that of `capacity`.

    What a rank keeps has the room of `capacity` always. Buffers grow with the plans: plans of such a step do not come
    again, and no CUDA graph holds on to them.
    """

    def __init__(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        self._usual = self.pairs
        self._records = self._sums

    def begin(self, plan: Plan, room: Tensor) -> None:
        here, everyone = self.world.rank, range(self.world.size)
        planned = plan.room or self._usual
        self.pairs = tuple(
            tuple(self._usual[a][b] if a == b else planned[a][b] for b in everyone) for a in everyone
        )  # fmt: skip
        leaving = [self.pairs[here][rank] for rank in everyone]
        coming = [self.pairs[rank][here] for rank in everyone]
        self.lines, wire = max(coming), self._format
        self._leaving, self._coming = ([*of[:here], 0, *of[here + 1 :]] for of in (leaving, coming))
        self._out = wire.row_words * sum(self._leaving)
        self._end = self._out + wire.row_words * sum(self._coming)
        self._make_room(self._end, sum(coming))
        self._leave_at = self._segments(self._leaving, 0, wire.row_words)
        self._come_at = self._segments(self._coming, self._out, wire.row_words)
        self._sums = self._records[: sum(coming)]
        own = sum(coming[:here])
        self._own = self._sums[own : own + coming[here]]
        for rank, rows in enumerate(leaving):  # no copy from the host, which a graph could not hold
            room[rank].fill_(rows)

    def _make_room(self, words: int, lines: int) -> None:
        device = self.world.device
        if words > len(self._wire):
            self._wire = torch.zeros(words + words // 4, dtype=torch.int32, device=device)
        if lines > len(self._records):
            self._records = torch.zeros(lines + lines // 4, self._records.shape[1], device=device)
            self._at = torch.tensor([self._records.data_ptr()], dtype=torch.int64, device=device)
        if lines != len(self._lines):
            self._lines = torch.arange(lines, dtype=torch.int32, device=device)
            self._here = torch.zeros(lines, dtype=torch.int32, device=device)
