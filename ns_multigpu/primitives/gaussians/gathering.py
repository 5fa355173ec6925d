"""New points in the place of old ones: every tensor of a model, its optimizers' moments too, gathered by one index.

Where tensors have room behind them (see `PointStorage`), new rows lie where the old ones lay, and parameters stay what
they are: whoever knows their addresses, such as the CUDA graph of a step, need not be told. Else there are new ones.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from ns_multigpu.primitives.gaussians.listing import Listing, Regrouping

_TOGETHER = 1 << 20
"""Points of a model at most whose parameters and moments are gathered at once."""


@torch.no_grad()
def gather_points(
    params: MutableMapping[str, Any],
    optimizers: Mapping[str, torch.optim.Optimizer],
    regrouping: Regrouping | Listing,
    edit: Callable[[str, Tensor], None] | None = None,
) -> None:
    """Puts new points in the place of the old ones. Of a small model all tensors are gathered in one launch; of a large
    one, one after the other: there are never two of it.

    Args:
        params: by name, with a line for each old point; replaced by new `Parameter`s where they have no room.
        optimizers: by parameter; may lack some. They go on with the new points.
        edit: makes a parameter's rows [T, ...], copied by the regrouping's source, what they are to be: name, rows.
    """
    source, taken = regrouping.source, None
    if len(params["means"]) <= _TOGETHER:
        everything = [x for name, p in params.items() for x in (p, *moments_of(p, optimizers.get(name)).values())]
        rows = cuda_ext.take_rows(everything, source)
        places = roomy(everything, len(source))
        if places is not None:
            torch._foreach_copy_(places, rows)  # pyright: ignore[reportPrivateImportUsage]
            regrouping.clear(_settle(params, optimizers, iter(places), edit))
            return
        taken = iter(rows)

    def rows_of(old: Tensor) -> Tensor:
        return next(taken) if taken is not None else cuda_ext.take_rows([old], source)[0]

    moments: list[Tensor] = []
    for name in list(params):
        rows = rows_of(params[name])
        if edit is not None:
            edit(name, rows)
        moments += replace_parameter(optimizers.get(name), params, name, rows, rows_of)
    regrouping.clear(moments)


def roomy(tensors: Sequence[Tensor], count: int) -> list[Tensor] | None:
    """The same memory as tensors of `count` rows, [count, ...] each; None unless there is room behind each of them, and
    for so many rows. Memory without room is as long as the tensor: it is to go with it."""
    result: list[Tensor] = []
    for x in tensors:
        here, there = x.detach(), x.untyped_storage().nbytes()
        row = here.element_size() * (here.stride(0) if here.dim() else 1)
        if x.storage_offset() != 0 or not x.is_contiguous() or not len(x) * row < there >= count * row:
            return None
        result.append(here.as_strided((count, *here.shape[1:]), here.stride()))
    return result


def zeros_there(x: Tensor, count: int) -> Tensor:
    """[count] zeros, where `x` [N] lies if there is room behind it for so many."""
    places = roomy([x], count)
    return x.new_zeros(count) if places is None else places[0].zero_()


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


def _settle(
    params: MutableMapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], places: Any,
    edit: Callable[[str, Tensor], None] | None,
) -> list[Tensor]:  # fmt: skip
    """Makes these the values of parameters and their moments, which stay the same objects; returns the moments."""
    moments: list[Tensor] = []
    for name, param in params.items():
        here = list(moments_of(param, optimizers.get(name)).values())
        param.data, param.grad = next(places), None
        if edit is not None:
            edit(name, param.data)
        for moment in here:
            moment.data = next(places)
        moments += here
    return moments
