"""Replacement of points: all tensors of a model and its optimizers' moments, gathered by one index.

Tensors with spare capacity (see `PointStorage`) are updated in place and keep their addresses, which CUDA graphs depend
on. Others are replaced.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from ns_multigpu.primitives.densify.index_map import IndexMap, Regrouping

_TOGETHER = 1 << 20
"""Maximum number of points whose parameters and moments are gathered at once."""


@dataclass(frozen=True)
class Gathering:
    """Tensors of a small model with spare capacity, found before the new number of points is known, so that host time
    overlaps device work.

    Attributes:
        params: by name.
        moments: by name, per-row optimizer state: see `moments_of`.
        buffers: full-capacity view of each parameter, followed by those of its moments.
    """

    params: dict[str, Tensor]
    moments: dict[str, list[Tensor]]
    buffers: list[Tensor]

    @classmethod
    def of(cls, params: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> "Gathering | None":
        """Collect a model's tensors; None if it is large or lacks spare capacity."""
        if len(params["means"]) > _TOGETHER:
            return None
        moments = {name: list(moments_of(p, optimizers.get(name)).values()) for name, p in params.items()}
        buffers = [_buffer_of(x) for name, p in params.items() for x in (p, *moments[name])]
        found = [buffer for buffer in buffers if buffer is not None]
        return cls(dict(params), moments, found) if len(found) == len(buffers) else None

    def serves(
        self, params: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], count: int
    ) -> bool:  # fmt: skip
        """Return True if these are still the model's tensors, at the same addresses, with capacity for `count`."""
        buffers = iter(self.buffers)
        for name, param in self.params.items():
            kept = optimizers[name].state.get(param, {}).values() if name in optimizers else ()
            known = {id(x) for x in kept}
            if params.get(name) is not param or any(id(moment) not in known for moment in self.moments[name]):
                return False
            for x in (param, *self.moments[name]):
                buffer = next(buffers)
                if x.data_ptr() != buffer.data_ptr() or count > len(buffer):
                    return False
        return len(self.params) == len(params)

    def take(self, source: Tensor, edit: Callable[[str, Tensor], None] | None) -> list[Tensor]:
        """Gather the rows `source` [T] to the front of all tensors; return the moments. See `gather_points`."""
        tensors = [x for name, p in self.params.items() for x in (p, *self.moments[name])]
        rows, places = cuda_ext.take_rows(tensors, source), [buffer[: len(source)] for buffer in self.buffers]
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
    regrouping: Regrouping | IndexMap,
    edit: Callable[[str, Tensor], None] | None = None,
    ready: Gathering | None = None,
) -> None:
    """Replace old points by new ones: in one launch for a small model, tensor by tensor for a large one to bound
    memory.

    Args:
        params: by name, with a row for each old point; replaced by new `Parameter`s without spare capacity.
        optimizers: by parameter; may lack some. They continue with the new points.
        edit: changes a parameter's copied rows [T, ...] in place: name, rows.
        ready: the model's tensors, if collected before.
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


def _buffer_of(x: Tensor) -> Tensor | None:
    """Return all rows that fit the memory of `x` [N, ...]; None without spare capacity."""
    row = x.element_size() * (x.stride(0) if x.dim() else 1)
    nbytes = x.untyped_storage().nbytes()
    if x.storage_offset() != 0 or not x.is_contiguous() or not len(x) * row < nbytes:
        return None
    return x.detach().as_strided((nbytes // row, *x.shape[1:]), x.stride())


def zeros_there(x: Tensor, count: int) -> Tensor:
    """Return [count] zeros, in the memory of `x` [N] if its capacity suffices."""
    buffer = _buffer_of(x)
    return x.new_zeros(count) if buffer is None or count > len(buffer) else buffer[:count].zero_()


def moments_of(param: Tensor, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return an optimizer's per-row state of a parameter, by name."""
    kept = {} if optimizer is None or param not in optimizer.state else optimizer.state[param]
    return {key: value for key, value in kept.items() if torch.is_tensor(value) and value.shape == param.shape}


def replace_parameter(
    optimizer: torch.optim.Optimizer | None, params: MutableMapping[str, Any], name: str, value: Tensor,
    rows_of: Callable[[Tensor], Tensor],
) -> list[Tensor]:  # fmt: skip
    """Replace the parameter `name` by `value` [T, ...], also in its optimizer, and gather its moments.

    Args:
        rows_of: maps an old moment to its rows [T, ...] of the new points; called for one after the other.

    Returns:
        the new moments, including fresh points'.
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
    for key in keys:  # release each as soon as its copy exists
        state[key] = rows_of(state[key])
    optimizer.state[new] = state
    return [state[key] for key in keys]
