"""Carries a model's rows to the ranks that will own them: parameters and moments, a few columns at a time.

Beside the model there is never more than one parameter's new rows (all three of its tensors where they are narrow) and
a buffer of few columns on either side of the exchange.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_ints_on_device, all_gather_objects, exchange_rows
from ns_multigpu.core.world import World
from ns_multigpu.primitives.gaussians.regroup import Regrouping
from ns_multigpu.primitives.sharded_order import Move

_COLUMNS = 16
"""Columns that travel together: one exchange for a narrow parameter and its moments, 64 bytes a row of a wide one."""

Edit = Callable[[str, Tensor, Regrouping], None]
"""Makes a parameter's rows [T, ...], copied by the regrouping's source, what they are to be: name, rows, regrouping."""


@dataclass(frozen=True)
class _Slot:
    """What an optimizer keeps for each row of a parameter: shape and type of a row."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _Kept:
    """What an optimizer keeps for a parameter: by row, by name; and the rest, such as the number of steps."""

    slots: dict[str, _Slot]
    rest: dict[str, Any]


def move_rows(
    params: MutableMapping[str, Any],
    optimizers: Mapping[str, torch.optim.Optimizer],
    regrouping: Regrouping,
    move: Move,
    world: World,
    edit: Edit | None = None,
) -> int:
    """Makes new points of this rank's old ones, brings them where they belong, and puts them in the old ones' place.

    A rank without points may not have stepped an optimizer as often as the others, or never: it gets what they have.

    Args:
        params: by name, with a line for each point; replaced by new `Parameter`s.
        optimizers: by parameter; may lack some, the same on every rank. They go on with the new parameters.
        regrouping: of this rank's points, in the order in which they leave (`Move.leaving`).
        move: see `plan_move`.
        edit: see `Edit`; must leave alone what is wide. None to change nothing.

    Returns:
        bytes a point, its key included.
    """
    row_bytes = 8
    kept = agree_on_kept(params, optimizers, world)
    for name in list(params):
        old = params[name]
        mine = optimizers[name].state.get(old, {}) if name in optimizers else {}
        slots = kept[name].slots
        tensors: list[Tensor | None] = [old.detach(), *(mine.get(key) for key in slots)]
        kinds = [_Slot(tuple(old.shape[1:]), old.dtype), *slots.values()]

        def finish(number: int, rows: Tensor, name: str = name) -> None:
            if number > 0:
                rows.index_fill_(0, regrouping.fresh, 0)
            elif edit is not None:
                edit(name, rows, regrouping)

        moved = _travel(tensors, kinds, regrouping.source, move, world, finish)
        row_bytes += sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in kinds)
        new = torch.nn.Parameter(moved[0], requires_grad=old.requires_grad)
        params[name] = new
        if name in optimizers:
            optimizer = optimizers[name]
            for group in optimizer.param_groups:
                group["params"] = [new if p is old else p for p in group["params"]]
            optimizer.state.pop(old, None)
            if kept[name].slots or kept[name].rest:
                optimizer.state[new] = kept[name].rest | dict(zip(slots, moved[1:], strict=True))
    return row_bytes


def agree_on_kept(
    params: Mapping[str, Tensor], optimizers: Mapping[str, torch.optim.Optimizer], world: World
) -> dict[str, _Kept]:
    """What the optimizers of all ranks keep, by parameter: of each moment that any has, and the rest of the rank that
    has taken the most steps."""
    mine = {name: _kept(optimizers.get(name), param) for name, param in params.items()}
    # Nearly always all keep the same: to ask that is quicker than to tell it.
    everyone = [mine]
    if len({row[0] for row in all_gather_ints_on_device([_digest(mine)], world)}) > 1:
        everyone = all_gather_objects(mine, world)
    agreed: dict[str, _Kept] = {}
    for name in params:
        of_name: list[_Kept] = [one[name] for one in everyone]
        slots = {key: one.slots[key] for one in of_name for key in one.slots}
        furthest = max(of_name, key=lambda one: float(one.rest.get("step", -1)))
        agreed[name] = _Kept(dict(sorted(slots.items())), furthest.rest)
    return agreed


def _digest(kept: Mapping[str, _Kept]) -> int:
    """A number of 64 bits that differs where what is kept does."""
    said: list[Any] = []
    for name, one in sorted(kept.items()):
        rest = {key: value.tolist() if torch.is_tensor(value) else value for key, value in one.rest.items()}
        said.append((name, sorted(one.slots.items()), sorted(rest.items())))
    return int.from_bytes(hashlib.blake2b(repr(said).encode(), digest_size=8).digest(), "big", signed=True)


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


def _travel(
    tensors: list[Tensor | None],
    kinds: list[_Slot],
    source: Tensor,
    move: Move,
    world: World,
    finish: Callable[[int, Tensor], None],
) -> list[Tensor]:
    """New rows of each tensor: those of `source`, finished, from all ranks, in order. None stands for zeros."""
    moved = [torch.empty(len(move.order), *k.shape, dtype=k.dtype, device=source.device) for k in kinds]
    for block in _blocks(kinds):
        pieces: list[Tensor] = []
        for number, a, b in block:
            tensor, kind = tensors[number], kinds[number]
            if tensor is None:
                pieces.append(torch.zeros(len(source), b - a, dtype=kind.dtype, device=source.device))
                continue
            piece = tensor.reshape(len(tensor), math.prod(kind.shape))[:, a:b][source]
            finish(number, piece.view(len(source), *kind.shape) if b - a == math.prod(kind.shape) else piece)
            pieces.append(piece)
        rows = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
        del pieces
        rows = exchange_rows(rows, move.send, move.receive, world)
        at = 0
        for number, a, b in block:
            flat = moved[number].view(len(move.order), math.prod(kinds[number].shape))
            flat[:, a:b] = rows[:, at : at + b - a][move.order]
            at += b - a
    return moved


def _blocks(kinds: list[_Slot]) -> list[list[tuple[int, int, int]]]:
    """What travels together: (tensor, first column, end), one type, at most _COLUMNS in all. A narrow one is whole."""
    blocks: list[list[tuple[int, int, int]]] = []
    room = 0
    for number, kind in enumerate(kinds):
        width = math.prod(kind.shape)
        for a in range(0, width, _COLUMNS):
            b = min(width, a + _COLUMNS)
            if b - a > room or kinds[blocks[-1][0][0]].dtype != kind.dtype:
                blocks.append([])
                room = _COLUMNS
            blocks[-1].append((number, a, b))
            room -= b - a
    return blocks
