"""Out-of-memory errors with the cause and remedies."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ns_multigpu.plugin.faults.signals import RanOutOfMemory

_DEVICE_SIGNS = (
    "CUDA error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
)
_HOST_SIGNS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "std::bad_alloc")
_MARGIN = 1 << 30
_GIB = 2**30


@dataclass(frozen=True)
class Circumstances:
    """Circumstances of a rank when its memory ran out.

    Attributes:
        rank: the rank.
        step: the step, or None before the first.
        device: its device.
        facts: what used memory, in words. gpu_remedies, host_remedies: changes of the method's options that help.
        last_checkpoint: checkpoint to resume from; "" if there is none.
    """

    rank: int
    step: int | None
    device: torch.device
    facts: Sequence[str] = ()
    gpu_remedies: Sequence[str] = ()
    host_remedies: Sequence[str] = ()
    last_checkpoint: str = ""


def where_memory_ran_out(error: BaseException) -> str | None:
    """Return "device" or "host" if `error`, or its cause, is a lack of memory there, else None."""
    seen: BaseException | None = None if isinstance(error, RanOutOfMemory) else error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, torch.cuda.OutOfMemoryError) or any(sign in text for sign in _DEVICE_SIGNS):
            return "device"
        if isinstance(seen, MemoryError) or (isinstance(seen, OSError) and seen.errno == errno.ENOMEM):
            return "host"
        if isinstance(seen, RuntimeError) and any(sign in text for sign in _HOST_SIGNS):
            return "host"
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return None


def explain(error: BaseException, now: Circumstances) -> RanOutOfMemory | None:
    """Return the error to raise instead of `error` if memory ran out; None otherwise."""
    where = where_memory_ran_out(error)
    if where is None:
        return None
    on_gpu, aggregate = where == "device" and now.device.type != "cpu", now.device.type == "multigpu"
    place = "one of its GPUs" if on_gpu and aggregate else f"its GPU ({now.device})" if on_gpu else "its machine"
    when = "before the first step" if now.step is None else f"in step {now.step}"
    facts = [*now.facts, _device_memory(now.device) if on_gpu else _host_memory()]
    if on_gpu and aggregate:
        general = "more GPUs in the device: --machine.num-devices"
    elif on_gpu:
        general = "less fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    else:
        general = "fewer workers on this machine: --machine.num-devices"
    remedies = [*(now.gpu_remedies if on_gpu else now.host_remedies), general]
    kept = f"\nThe last checkpoint is kept: {now.last_checkpoint}" if now.last_checkpoint else ""
    return RanOutOfMemory(
        f"Rank {now.rank} ran out of memory on {place} {when}: {'; '.join(facts)}.\nWhat helps, one or more of:\n  - "
        + "\n  - ".join(remedies)
        + kept
    )


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU, or of the device of all, that this process can still allocate, idle blocks included;
    None on a CPU."""
    if device.type == "multigpu":
        return torch.get_device_module(device).free_bytes()
    if device.type != "cuda":
        return None
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def release_idle_blocks(device: torch.device) -> None:
    """Return the allocator's idle blocks to a GPU that has less than that free.

    Called before a capture, which uses a separate pool and cannot release idle blocks.
    """
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if torch.cuda.mem_get_info(device)[0] < idle:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def hoards(device: torch.device) -> bool:
    """Return whether the allocator has reserved more than three times the peak use.

    Graphs captured in turn in one pool, each a little larger than the last, leave fragments that fit none of them.
    """
    return torch.cuda.memory_reserved(device) > 3 * torch.cuda.max_memory_allocated(device) + _MARGIN


def has_spare_capacity(device: torch.device) -> bool:
    """Return whether a GPU's free memory exceeds the allocator's idle memory by a margin.

    That suffices for a graph's own copy of a step's buffers, next to those of the next step.
    """
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] >= idle + _MARGIN


def _device_memory(device: torch.device) -> str:
    if device.type == "multigpu":
        held = torch.get_device_module(device).memory()
        return f"{held['allocated'] / _GIB:.1f} GiB of tensors on each GPU, {held['cached'] / _GIB:.1f} GiB idle"
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"{peak / _GIB:.1f} GiB in use at the peak, {reserved / _GIB:.1f} GiB reserved by this process, "
        f"{free / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB"
    )


def _host_memory() -> str:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            table = {line.split(":")[0]: int(line.split()[1]) / 2**20 for line in file}
    except (OSError, ValueError, IndexError):
        return "the machine does not say how much it has"
    return f"{table.get('MemAvailable', 0):.1f} GiB free of {table.get('MemTotal', 0):.1f} GiB on the machine"
