"""Several GPUs as one PyTorch device, `multigpu`, in one process (after torch-dgx).

    from ns_multigpu import aggregate

    model = Model().to("multigpu")                  # all visible GPUs
    aggregate.use(gpus=[0, 1])                      # or: these, before the first tensor
    aggregate.use(host_members=2)                   # or: two pretended GPUs in host memory, for tests

A tensor is one range of addresses that all members can access; each member holds an even shard. An operator is torch's
own, called by each member for its shard of the result. docs/methods/aggregate.md lists what is split.

Importing this module registers the device, and the module itself as `torch.multigpu`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from cuda_ext.aggregate import load
from ns_multigpu.core.dist.members import Members
from ns_multigpu.core.exchange.transports import make_transport
from ns_multigpu.core.kernels import Kernels
from ns_multigpu.core.step.member_steps import MemberSteps
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.strategy import Strategy

SMALL_BYTES = 256 * 1024
"""Tensors below this stay on the first member: starting kernels on all would take longer than they."""
_ROWS = 64

load()
_ops = torch.ops.multigpu
_gpus: list[int] = []


def use(
    gpus: Sequence[int] | None = None, host_members: int = 0, host_bytes: int = 2**40, small_bytes: int = SMALL_BYTES
) -> None:
    """Choose the members of the device. Without a call the first tensor chooses all visible GPUs.

    Args:
        gpus: numbers of GPUs; None: all visible ones.
        host_members: number of pretended GPUs in host memory, instead of GPUs.
        host_bytes: memory of each of them.
        small_bytes: tensors of fewer bytes stay on the first member.

    Raises:
        RuntimeError: no GPU is visible, two GPUs cannot access each other's memory, tensors of the device exist, or
            this process was forked from one that uses it.
        ValueError: the GPUs or sizes are out of range.
    """
    if host_members < 0 or small_bytes < 1 or (gpus is not None and (host_members or not gpus)):
        raise ValueError("Give numbers of GPUs, or at least one of host_members; small_bytes is at least 1.")
    chosen = [] if host_members else list(range(torch.cuda.device_count()) if gpus is None else gpus)
    if not host_members:
        _check_gpus(chosen)
    _ops.start(chosen, host_members, host_bytes, small_bytes)
    _gpus[:] = chosen


def _check_gpus(gpus: Sequence[int]) -> None:
    if not gpus:
        raise RuntimeError("No GPU is visible. aggregate.use(host_members=2) makes pretended ones in host memory.")
    if len(set(gpus)) < len(gpus) or not all(0 <= gpu < torch.cuda.device_count() for gpu in gpus):
        raise ValueError(f"gpus must be different numbers below {torch.cuda.device_count()}, and are {list(gpus)}.")
    torch.cuda.init()
    for gpu in gpus:
        for other in gpus:
            if gpu != other and not torch.cuda.can_device_access_peer(gpu, other):
                raise RuntimeError(
                    f"GPU {gpu} cannot access the memory of GPU {other}: multigpu needs peer access (NVLink, or PCIe "
                    "without isolation). Choose other GPUs by aggregate.use(gpus=[...]) or CUDA_VISIBLE_DEVICES, or "
                    "use splatfacto-tile."
                )
            if gpu != other:  # with its first copy torch opens the memory of its own allocator to the other GPU
                torch.zeros(1, device=f"cuda:{gpu}").to(f"cuda:{other}")


def in_use() -> bool:
    """Return whether `use` or a first tensor has chosen the members."""
    return bool(calls())


def calls() -> list[int]:
    """Return the number of calls of torch's operators by each member since `use`."""
    return _ops.calls()


def max_memory_allocated(device: object = None) -> int:
    """Return the most bytes that one member has held: of tensors since `use`, and of torch's own allocator."""
    del device
    own = [torch.cuda.max_memory_allocated(gpu) for gpu in _gpus]
    return _ops.memory()[2] + max(own, default=0)


def free_bytes() -> int | None:
    """Return the bytes that tensors can still take on all GPUs, unused blocks included; None for host members."""
    if not _gpus:
        return None
    free = [
        torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        for gpu in _gpus
    ]
    return len(_gpus) * (min(free) + _ops.memory()[1])


def memory() -> dict[str, int]:
    """Return the bytes of tensors and of the pool's unused blocks on each member, without small tensors."""
    allocated, cached, _ = _ops.memory()
    return {"allocated": allocated, "cached": cached}


def empty_cache() -> None:
    """Free the pool's unused blocks."""
    _ops.empty_cache()


def synchronize(device: object = None) -> None:
    """Wait until all members have finished."""
    del device
    _ops.synchronize()


def is_available() -> bool:
    """Return whether a GPU is visible, or host members are in use."""
    return torch.cuda.is_available() or in_use()


def device_count() -> int:
    """Return 1: all members are one device."""
    return 1


def current_device() -> int:
    """Return 0: all members are one device."""
    return 0


def current_stream(device: object = None) -> torch.Stream:
    """Return the one stream of the device: all work is ordered by the first member's."""
    del device
    return torch.accelerator.current_stream()


@contextmanager
def stream(stream: torch.Stream) -> Iterator[None]:
    """Do nothing: the device has one stream."""
    del stream
    yield


def _is_in_bad_fork() -> bool:
    return _ops.forked()


def manual_seed_all(seed: int) -> None:
    """Do nothing: the first member draws by torch's own generators, which torch seeds itself."""


@contextmanager
def _current(device: object) -> Iterator[None]:
    yield


device = _current
torch.utils.rename_privateuse1_backend("multigpu")
torch._register_device_module("multigpu", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
_library = Library("multigpu", "IMPL")
_library.impl("use_all", use, "CompositeExplicitAutograd")


def shards(tensor: Tensor) -> list[int]:
    """Return the bytes of a tensor's storage on each member."""
    return _ops.shards(tensor)


def devices() -> list[torch.device]:
    """Return the members' own devices, in their order: GPUs, or the CPU for each member in host memory."""
    return [torch.device("cuda", gpu) for gpu in _gpus] or [torch.device("cpu")] * len(calls())


def member_views(tensor: Tensor) -> list[Tensor]:
    """Return a tensor as each member addresses it: tensors of `devices` on the same memory.

    Work on them belongs on the members' current streams, after and before a `Members.meet`.

    Raises:
        ValueError: the tensor is not on this device.
    """
    return _ops.member_views(tensor.detach())


def member_rows(tensor: Tensor) -> list[Tensor]:
    """Return each member's rows of a tensor [N, ...]: see `member_views`. They are split evenly in multiples of 64, so
    that kernels find them at aligned addresses."""
    views = member_views(tensor)
    rows = _ROWS * -(-len(tensor) // (_ROWS * len(views)))
    return [view[member * rows : (member + 1) * rows] for member, view in enumerate(views)]


def _member_records(record: Any) -> list[Any]:
    """Return a dataclass as each member addresses the tensors in it: see `member_views`."""
    of_all = {name: member_views(value) for name, value in vars(record).items() if isinstance(value, Tensor)}
    return [replace(record, **{name: of[rank] for name, of in of_all.items()}) for rank in range(len(devices()))]


def fused_steps(
    members: Members, strategies: Sequence[Strategy], kernels: Kernels, params: Mapping[str, Tensor],
    moments: Mapping[str, tuple[Tensor, Tensor]], statistics: Mapping[str, Tensor], settings: StepSettings,
    options: Sequence[Mapping[str, Any]],
) -> MemberSteps:  # fmt: skip
    """Return fused steps of a model on this device: each member takes the step of its rows.

    Args:
        members: of `devices`. strategies: of each member's world, such as `tile`.
        kernels, params, moments, statistics, settings: see `Step`; tensors of this device, with equally many rows.
        options: of each member's `Step`, such as `lazy` of its rows.
    """
    of_params = {name: member_rows(value) for name, value in params.items()}
    of_moments = {name: tuple(map(member_rows, both)) for name, both in moments.items()}
    of_statistics = {name: member_rows(value) for name, value in statistics.items()}
    steps, of_kernels = list[Step](), _member_records(kernels)
    for rank, (strategy, own) in enumerate(zip(strategies, of_kernels, strict=True)):
        tensors = (
            {name: rows[rank] for name, rows in of_params.items()},
            {name: (first[rank], second[rank]) for name, (first, second) in of_moments.items()},
            {name: rows[rank] for name, rows in of_statistics.items()},
        )
        with members.on(rank):
            sizes = settings.rows, settings.segment, settings.words(strategy.assignment)
            transport = make_transport(strategy.rows, strategy.gradients, strategy.world, own, *sizes, peer=True)
            steps.append(Step(own, *tensors, settings, strategy, transport, **options[rank]))
    return MemberSteps(steps, members)
