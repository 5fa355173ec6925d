"""A CUDA graph's replacement on a CPU: operators are recorded once and replayed on the same memory.

It has the restrictions of a graph. During recording nothing may be read back to the host, and no host list may become
a tensor. No size may depend on numbers of the device. As on a GPU, recorded operators are not run during recording.
"""

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ns_multigpu.plugin.blocks.graphs import GraphPool

_READ_BACK = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")
_WRAPPERS = [
    f"cuda_ext.ops.{name}"
    for name in (
        "optim.lazy_adam", "exchange.row_exchange", "exchange.row_footprint", "exchange.row_wire", "optim.adam",
        "loss.band_loss", "sort.peer_sort", "optim.fused", "optim.step_control", "optim.poses",
    )
]  # fmt: skip


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self.before: dict[int, tuple[Any, Any]] = {}  # what memory held, by its address, before it was first written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func).startswith(_READ_BACK):
            raise AssertionError(f"{func} waits for the device, or its result has a size that only the device knows")
        # A number alone, as in x[0] = 1.0, is an argument of a kernel.
        if str(func).startswith("aten.lift_fresh") and args[0].dim() > 0:
            raise AssertionError(f"{args[0].tolist()} is made from a list: to a GPU that is a copy, which waits")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._keep(argument, value)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                self._keep(argument, kwargs[argument.name])
        result = _run(func, args, kwargs)
        # The same memory without what autograd knows of it: a graph knows none of that.
        args, kwargs, noted = tree_map(_plain, (args, kwargs, tree_leaves(result)))
        self.calls.append((func, args, kwargs, [x for x in noted if isinstance(x, torch.Tensor)]))
        return result

    def undo(self) -> None:
        for memory, before in self.before.values():
            memory.copy_(before)

    def _keep(self, argument: Any, value: Any) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                memory = tensor.untyped_storage()
                self.before.setdefault(memory.data_ptr(), (memory, memory.clone()))


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator. On a CPU ours are composed from torch's and use autograd, which is off within a dispatch
    mode. So their outputs must be detached before they are returned."""
    if func.namespace != "ns_multigpu":
        return func(*args, **kwargs)
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        result = func(*args, **kwargs)
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, result)


class _Recorded:
    def __init__(self, notes: _Notes) -> None:
        self._calls = notes.calls

    def replay(self) -> None:
        for func, args, kwargs, noted in self._calls:
            found = [x for x in tree_leaves(_run(func, args, kwargs)) if isinstance(x, torch.Tensor)]
            for there, now in zip(noted, found, strict=True):
                assert there.shape == now.shape, f"{func}: {list(there.shape)} when noted, {list(now.shape)} now"
                if there.untyped_storage().data_ptr() != now.untyped_storage().data_ptr():
                    there.copy_(now)


class RecordedPool(GraphPool):
    """Stands for a `GraphPool` where there is no GPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def afresh(self) -> "RecordedPool":
        return RecordedPool()

    def has_spare_capacity(self) -> bool:
        return True

    def hoards(self) -> bool:
        return False

    def prepare(self) -> None:
        return

    def capture(self, part: Callable[[], None], stream: Any = None) -> _Recorded:
        with ExitStack() as stack:
            # One operator each, as on a GPU, instead of the many that do the same on a CPU.
            for module in map(importlib.import_module, _WRAPPERS):
                stack.enter_context(patch.object(module, "kernels_serve", lambda _: True))
            notes = _Notes()
            stack.callback(notes.undo)
            stack.enter_context(notes)
            part()
        return _Recorded(notes)
