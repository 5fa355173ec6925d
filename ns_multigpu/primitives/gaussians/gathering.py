"""New points in the place of old ones: every tensor of a model, its optimizers' moments too, gathered by one index.

Where tensors have room behind them (see `PointStorage`), new rows lie where the old ones lay, and parameters stay what
they are: whoever knows their addresses, such as the CUDA graph of a step, need not be told. Else there are new ones.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from ns_multigpu.primitives.gaussians.index_map import Listing, Regrouping

_TOGETHER = 1 << 20
"""Points of a model at most whose parameters and moments are gathered at once."""


@dataclass(frozen=True)
class Gathering:
    """The tensors of a small model that has room behind all of them, found before it is known how many points there
    will be: what takes the host time need not be done while the device waits.

    Attributes:
        params: by name.
        moments: by name, what optimizers keep for each row: see `moments_of`.
        rooms: of each parameter and, behind it, of its moments: all rows that its memory has room for.
    """

    params: dict[str, Tensor]
    moments: dict[str, list[Tensor]]
    rooms: list[Tensor]

    @classmethod
    def of(cls, params: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> "Gathering | None":
        """That of a model; None where it is large, or has no room."""
        if len(params["means"]) > _TOGETHER:
            return None
        moments = {name: list(moments_of(p, optimizers.get(name)).values()) for name, p in params.items()}
        rooms = [_room(x) for name, p in params.items() for x in (p, *moments[name])]
        found = [room for room in rooms if room is not None]
        return cls(dict(params), moments, found) if len(found) == len(rooms) else None

    def serves(
        self, params: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], count: int
    ) -> bool:  # fmt: skip
        """Whether these are the model's tensors still, where they were, and have room for so many points."""
        rooms = iter(self.rooms)
        for name, param in self.params.items():
            kept = optimizers[name].state.get(param, {}).values() if name in optimizers else ()
            known = {id(x) for x in kept}
            if params.get(name) is not param or any(id(moment) not in known for moment in self.moments[name]):
                return False
            for x in (param, *self.moments[name]):
                room = next(rooms)
                if x.data_ptr() != room.data_ptr() or count > len(room):
                    return False
        return len(self.params) == len(params)

    def take(self, source: Tensor, edit: Callable[[str, Tensor], None] | None) -> list[Tensor]:
        """Brings the rows `source` [T] to the front of all tensors, which stay the same objects; returns the moments.
        See `gather_points`."""
        tensors = [x for name, p in self.params.items() for x in (p, *self.moments[name])]
        rows, places = cuda_ext.take_rows(tensors, source), [room[: len(source)] for room in self.rooms]
        torch._foreach_copy_(places, rows)  # pyright: ignore[reportPrivateImportUsage]
        each = iter(places)
        for name, param in self.params.items():
            param.data, param.grad = next(each), None
            if edit is not None:
                edit(name, param.data)
            for moment in self.moments[name]:
                moment.data = next(each)
        return [moment for moments in self.moments.values() for moment in moments]


@torch.no_grad()
def gather_points(
    params: MutableMapping[str, Any],
    optimizers: Mapping[str, torch.optim.Optimizer],
    regrouping: Regrouping | Listing,
    edit: Callable[[str, Tensor], None] | None = None,
    ready: Gathering | None = None,
) -> None:
    """Puts new points in the place of the old ones. Of a small model all tensors are gathered in one launch; of a large
    one, one after the other: there are never two of it.

    Args:
        params: by name, with a line for each old point; replaced by new `Parameter`s where they have no room.
        optimizers: by parameter; may lack some. They go on with the new points.
        edit: makes a parameter's rows [T, ...], copied by the regrouping's source, what they are to be: name, rows.
        ready: the model's, where it has been found ahead.
    """
    source, taken = regrouping.source, None
    if ready is None or not ready.serves(params, optimizers, len(source)):
        ready = Gathering.of(params, optimizers)
    if ready is not None and ready.serves(params, optimizers, len(source)):
        regrouping.clear(ready.take(source, edit))
        return
    if len(params["means"]) <= _TOGETHER:
        everything = [x for name, p in params.items() for x in (p, *moments_of(p, optimizers.get(name)).values())]
        taken = iter(cuda_ext.take_rows(everything, source))

    def rows_of(old: Tensor) -> Tensor:
        return next(taken) if taken is not None else cuda_ext.take_rows([old], source)[0]

    moments: list[Tensor] = []
    for name in list(params):
        rows = rows_of(params[name])
        if edit is not None:
            edit(name, rows)
        moments += replace_parameter(optimizers.get(name), params, name, rows, rows_of)
    regrouping.clear(moments)


def _room(x: Tensor) -> Tensor | None:
    """All rows that there is room for where `x` [N, ...] lies. None unless there is room behind it: memory without is
    as long as the tensor, and is to go with it."""
    row = x.element_size() * (x.stride(0) if x.dim() else 1)
    nbytes = x.untyped_storage().nbytes()
    if x.storage_offset() != 0 or not x.is_contiguous() or not len(x) * row < nbytes:
        return None
    return x.detach().as_strided((nbytes // row, *x.shape[1:]), x.stride())


def zeros_there(x: Tensor, count: int) -> Tensor:
    """[count] zeros, where `x` [N] lies if there is room behind it for so many."""
    room = _room(x)
    return x.new_zeros(count) if room is None or count > len(room) else room[:count].zero_()


def moments_of(param: Tensor, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """What an optimizer keeps for each row of a parameter, by name."""
    kept = {} if optimizer is None or param not in optimizer.state else optimizer.state[param]
    return {key: value for key, value in kept.items() if torch.is_tensor(value) and value.shape == param.shape}


def replace_parameter(
    optimizer: torch.optim.Optimizer | None, params: MutableMapping[str, Any], name: str, value: Tensor,
    rows_of: Callable[[Tensor], Tensor],
) -> list[Tensor]:  # fmt: skip
    """Puts `value` [T, ...] in place of the parameter `name`, in its optimizer too, whose moments follow.

    Args:
        rows_of: given an old moment, its rows [T, ...] of the new points; asked for one after the other.

    Returns:
        the new moments, fresh points' too.
    """
    old = params[name]
    new = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    params[name] = new
    if optimizer is None:
        return []
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    if old not in optimizer.state:
        return []
    keys, state = list(moments_of(old, optimizer)), optimizer.state.pop(old)
    for key in keys:  # each goes as soon as there is a new one
        state[key] = rows_of(state[key])
    optimizer.state[new] = state
    return [state[key] for key in keys]
