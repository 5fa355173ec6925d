"""Exchange of a model's rows with their new owners: parameters and moments, a few columns at a time."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_objects, exchange_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.primitives.densify.index_map import Regrouping
from ns_multigpu.primitives.sharded_order import PointMove

_WIDTH = 64
"""Minimum bytes per row of one exchange: a narrow parameter with its moments."""
_AT_ONCE = 1 << 26
"""Bytes per exchange if rows are few: each exchange synchronises the ranks."""

Edit = Callable[[str, Tensor, Regrouping], None]
"""Makes a parameter's rows [T, ...], copied by the regrouping's source, what they are to be: name, rows, regrouping."""


@dataclass(frozen=True)
class _Slot:
    """Row shape and type of a parameter's per-row optimizer state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _Kept:
    """Optimizer state of a parameter: per-row state by name, and the rest, such as the step count."""

    slots: dict[str, _Slot]
    rest: dict[str, Any]


def move_rows(
    params: MutableMapping[str, Any],
    optimizers: Mapping[str, torch.optim.Optimizer],
    regrouping: Regrouping,
    move: PointMove,
    kept: "OptimizerStates",
    world: World,
    edit: Edit | None = None,
) -> int:
    """Create new points from this rank's old ones, send them to their owners, and replace the old ones.

    A rank without points may have run fewer optimizer steps than the others, or none: it receives their state.

    Args:
        params: by name, with a row for each point; replaced by new `Parameter`s.
        optimizers: by parameter; may lack some, the same on every rank. They continue with the new parameters.
        regrouping: of this rank's points, in sending order (`PointMove.in_sending_order`).
        move: see `plan_move`.
        kept: merged optimizer states of all ranks.
        edit: see `Edit`; must not change wide parameters. None to change nothing.

    Returns:
        bytes per point, its key included.
    """
    remote_split = _RemoteSplit.of(regrouping, move, world.rank)

    def finish(name: str, number: int, rows: Tensor, part: Regrouping) -> None:
        if number > 0:
            rows.index_fill_(0, part.fresh, 0)
        elif edit is not None:
            edit(name, rows, part)

    columns: dict[str, list[_Column]] = {}
    for name, old in params.items():
        mine = optimizers[name].state.get(old, {}) if name in optimizers else {}
        slots = kept.of[name].slots
        tensors: list[Tensor | None] = [old.detach(), *(mine.get(key) for key in slots)]
        types = [_Slot(tuple(old.shape[1:]), old.dtype), *slots.values()]
        pairs = enumerate(zip(tensors, types, strict=True))
        columns[name] = [_Column(tensor, kind, partial(finish, name, number)) for number, (tensor, kind) in pairs]
    received_columns = _ReceivedColumns([one for of in columns.values() for one in of], remote_split, move.moved, world)
    for name in list(params):
        old, of_name = params[name], columns.pop(name)
        moved = [_put_together(one, remote_split, received_columns.next()) for one in of_name]
        new = torch.nn.Parameter(moved[0], requires_grad=old.requires_grad)
        params[name] = new
        if name in optimizers:
            optimizer = optimizers[name]
            for group in optimizer.param_groups:
                group["params"] = [new if p is old else p for p in group["params"]]
            optimizer.state.pop(old, None)
            if kept.of[name].slots or kept.of[name].rest:
                optimizer.state[new] = kept.of[name].rest | dict(zip(kept.of[name].slots, moved[1:], strict=True))
    return 8 + received_columns.row_bytes


@dataclass(frozen=True)
class OptimizerStates:
    """Optimizer states by parameter."""

    of: dict[str, _Kept]

    @staticmethod
    def here(params: Mapping[str, Tensor], optimizers: Mapping[str, torch.optim.Optimizer]) -> "OptimizerStates":
        """Return the states of this rank's optimizers, which may lack some parameters."""
        return OptimizerStates({name: _kept(optimizers.get(name), param) for name, param in params.items()})

    @property
    def tag(self) -> int:
        """64-bit hash of the states."""
        said: list[Any] = []
        for name, one in sorted(self.of.items()):
            rest = {key: value.tolist() if torch.is_tensor(value) else value for key, value in one.rest.items()}
            said.append((name, sorted(one.slots.items()), sorted(rest.items())))
        return int.from_bytes(hashlib.blake2b(repr(said).encode(), digest_size=8).digest(), "big", signed=True)

    def agree(self, tags: Sequence[int], world: World) -> "OptimizerStates":
        """Merge the states of all ranks: every moment that any has, and the rest of the rank with the most steps. Every
        rank calls it.

        Args:
            tags: all ranks' hashes. If all are equal, as nearly always, nothing is exchanged.
        """
        everyone = [self] if len(set(tags)) == 1 else all_gather_objects(self, world)
        agreed: dict[str, _Kept] = {}
        for name in self.of:
            of_name: list[_Kept] = [one.of[name] for one in everyone]
            slots = {key: one.slots[key] for one in of_name for key in one.slots}
            furthest = max(of_name, key=lambda one: float(one.rest.get("step", -1)))
            agreed[name] = _Kept(dict(sorted(slots.items())), furthest.rest)
        return OptimizerStates(agreed)


def _kept(optimizer: torch.optim.Optimizer | None, param: Tensor) -> _Kept:
    if optimizer is None or param not in optimizer.state:
        return _Kept({}, {})
    slots: dict[str, _Slot] = {}
    rest: dict[str, Any] = {}
    for key, value in optimizer.state[param].items():
        if torch.is_tensor(value) and value.dim() > 0 and len(value) == len(param):
            slots[key] = _Slot(tuple(value.shape[1:]), value.dtype)
        else:
            rest[key] = value.cpu() if torch.is_tensor(value) else value
    return _Kept(slots, rest)


@dataclass(frozen=True)
class _Column:
    """A tensor with a row for each point; None stands for zeros.

    Attributes:
        finish: makes copied rows of it what they are to be, by the part of the regrouping that they are.
    """

    tensor: Tensor | None
    kind: _Slot
    finish: Callable[[Tensor, Regrouping], None]

    @property
    def width(self) -> int:
        """Numbers per row."""
        return math.prod(self.kind.shape)

    @property
    def row_bytes(self) -> int:
        return self.width * self.kind.dtype.itemsize

    def rows(self, part: Regrouping, first: int = 0, end: int | None = None) -> Tensor:
        """Return columns [rows, end - first] of a part of the new points; for all columns, in their full shape."""
        count, end = len(part.source), self.width if end is None else end
        shape = self.kind.shape if end - first == self.width else (end - first,)
        if self.tensor is None or len(self.tensor) == 0:
            return torch.zeros(count, *shape, dtype=self.kind.dtype, device=part.source.device)
        flat = self.tensor.reshape(len(self.tensor), self.width)[:, first:end]
        rows = flat.index_select(0, part.source).view(count, *shape)
        self.finish(rows, part)
        return rows


@dataclass(frozen=True)
class _RemoteSplit:
    """Regrouping split by the owner of the new points. Between two refinements few points change owners.

    Local ones are gathered once, directly into their final rows; only the others are packed and exchanged.

    Attributes:
        local: of all T final rows of this rank, in final order. Rows from other ranks are placeholder copies of the
            first old point.
        sent: of the rows for other ranks, in sending order.
        received_rows: [K] int64, the rows of `local` that other ranks send, in receiving order.
        send, receive: number of rows to and from each rank; 0 for this rank.
    """

    local: Regrouping
    sent: Regrouping
    received_rows: Tensor
    send: list[int]
    receive: list[int]

    @staticmethod
    def of(regrouping: Regrouping, move: PointMove, rank: int) -> "_RemoteSplit":
        """Split the points of a rank.

        Args:
            regrouping: in sending order (`PointMove.in_sending_order`).
            move: see there.
        """
        place = torch.empty_like(move.order)
        place.scatter_(0, move.order, torch.arange(len(place), device=place.device))
        first, count, before = sum(move.send[:rank]), move.send[rank], sum(move.receive[:rank])
        own, others = place[before : before + count], torch.cat([place[:before], place[before + count :]])
        source = torch.zeros_like(place).scatter_(0, own, regrouping.source[first : first + count])
        none = regrouping.source[:0]
        sent = Regrouping(none, none, none, regrouping.offsets[:0])
        if move.moved == 0:
            local = Regrouping(source, own[regrouping.fresh], own[regrouping.children], regrouping.offsets)
        else:
            fresh, children = regrouping.fresh - first, regrouping.children - first
            fresh_here, born_here = ((rows >= 0) & (rows < count) for rows in (fresh, children))
            local = Regrouping(source, own[fresh[fresh_here]], own[children[born_here]], regrouping.offsets[born_here])
            sent_source = torch.cat([regrouping.source[:first], regrouping.source[first + count :]])
            fresh, children = regrouping.fresh[~fresh_here], regrouping.children[~born_here]
            fresh, children = (rows - count * (rows >= first) for rows in (fresh, children))
            sent = Regrouping(sent_source, fresh, children, regrouping.offsets[~born_here])
        send, receive = ([0 if other == rank else n for other, n in enumerate(of)] for of in (move.send, move.receive))
        return _RemoteSplit(local, sent, others, send, receive)


class _ReceivedColumns:
    """Columns received from other ranks, one after the other. A column is exchanged on demand, together with as many
    later ones as the buffer holds: the same on all ranks.

    Args:
        columns: of all parameters. moved: rows exchanged between any ranks.

    Attributes:
        row_bytes: of all columns.
    """

    def __init__(self, columns: list[_Column], remote_split: _RemoteSplit, moved: int, world: World) -> None:
        self._remote_split, self._moved, self._world = remote_split, moved, world
        self.row_bytes = sum(one.row_bytes for one in columns)
        self._waiting = deque(columns)
        # Parts of columns that are not yet exchanged; none if no row moves, because references would keep memory alive.
        self._left: deque[tuple[_Column, int, int]] = deque()
        num_bytes = max(_WIDTH, _AT_ONCE // max(moved, 1))
        for one in columns if moved else ():
            step = max(1, num_bytes // one.kind.dtype.itemsize)
            self._left += [(one, a, min(one.width, a + step)) for a in range(0, one.width, step)]
        self._num_bytes = num_bytes
        self._there: deque[Tensor] = deque()  # bytes [K, ...] of such parts

    def next(self) -> Tensor:
        """Return the received rows of the next column, [K, ...]."""
        column, count = self._waiting.popleft(), len(self._remote_split.received_rows)
        parts: list[Tensor] = []
        while sum(piece.shape[1] for piece in parts) < column.row_bytes and self._moved:
            if not self._there:
                self._receive()
            parts.append(self._there.popleft())
        shape = (count, *column.kind.shape)
        if not parts or count == 0:
            return torch.empty(shape, dtype=column.kind.dtype, device=self._remote_split.received_rows.device)
        return torch.cat(parts, 1).view(column.kind.dtype).view(shape)

    def _receive(self) -> None:
        """Exchange the next parts."""
        packed: list[Tensor] = []
        widths: list[int] = []
        while self._left:
            column, a, b = self._left[0]
            width = (b - a) * column.kind.dtype.itemsize
            if widths and sum(widths) + width > self._num_bytes:
                break
            self._left.popleft()
            rows = column.rows(self._remote_split.sent, a, b)
            packed.append(rows.reshape(len(rows), b - a).view(torch.uint8))
            widths.append(width)
        rows = torch.cat(packed, 1) if len(packed) > 1 else packed[0]
        rows = exchange_rows(rows, self._remote_split.send, self._remote_split.receive, self._world)
        self._there += rows.split(widths, 1)


def _put_together(column: _Column, remote_split: _RemoteSplit, received: Tensor) -> Tensor:
    """Combine the local and the received rows of a column, [T, ...]."""
    rows = column.rows(remote_split.local)
    return rows.index_copy_(0, remote_split.received_rows, received) if len(received) else rows
