# pyright: reportPrivateImportUsage=false
"""Memory that every GPU of a machine reads and writes directly, and the check that it is available.

It is torch's symmetric memory (torch.distributed._symmetric_memory): one allocation of equal size on each rank, mapped
by all. The ranks of one process (`Members`) use ordinary memory.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_objects, barrier
from ns_multigpu.core.dist.world import World, gpus_are_shared

TRIAL_TIMEOUT_MS = 30_000
"""Timeout of the trial's barrier, in milliseconds."""

_T = TypeVar("_T")


class PeerBuffer:
    """Buffer of equal size on each rank that every rank reads and writes. Collective: all ranks create it.

    Its bytes are not initialised. Kernels that write to others' buffers, `barrier`, and kernels that then read their
    own belong on the same stream. In a world of one it is ordinary memory of the world's device.

    Args:
        size: bytes of a rank's buffer, at least 1, the same on every rank.
        world: the ranks, all of which make theirs together.
        machine: only the ranks of this rank's machine access its buffer, and are meant by their numbers there.

    Raises:
        ValueError: `size` is below 1, or not the same on all ranks.
        RuntimeError: it cannot be had, on every rank if on one: out of memory, or no peer memory (`choose_transport`
            says beforehand).

    Attributes:
        local: [size] uint8, this rank's own buffer.
        addresses: where each rank's buffer lies in this process's address space, multiples of 16.
    """

    def __init__(self, size: int, world: World, *, machine: bool = False) -> None:
        sizes = cast(list[int], all_gather_objects(size, world))
        if min(sizes) < 1 or min(sizes) != max(sizes):
            raise ValueError(f"PeerBuffer: the ranks ask for {sizes} bytes; need the same number, at least 1.")
        self._handle: Any = None
        group, rank, ranks = world.group, world.rank, world.size
        if machine:
            group, rank, ranks = world.local_group, world.local_rank, world.local_size
        if world.members is not None:
            self._owned = world.members.buffers(rank, size)
            self._buffers = [_seen_from(world.device, buffer) for buffer in self._owned]
            self.local = self._buffers[rank]
        elif world.group is None:
            self.local = torch.empty(size, dtype=torch.uint8, device=world.device)
            self._buffers = [self.local]
        else:
            if world.device.type != "cuda":
                raise RuntimeError(f"PeerBuffer: there is no peer memory on {world.device}; it takes GPUs.")
            self.local = _all_or_none("allocate", lambda: _allocate(size, world), world)
            self._handle = _all_or_none("map", lambda: _rendezvous(self.local, group), world)
            self._buffers = [
                self.local if other == rank else cast(Tensor, self._handle.get_buffer(other, (size,), torch.uint8))
                for other in range(ranks)
            ]
        self.addresses: list[int] = [buffer.data_ptr() for buffer in self._buffers]

    @property
    def size(self) -> int:
        """Bytes of a rank's buffer."""
        return self.local.shape[0]

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor on part of a rank's buffer. Writing to it writes that rank's memory.

        Args:
            rank: whose.
            offset: in bytes, a multiple of the dtype's size.
            shape, dtype: of the tensor.

        Raises:
            ValueError: it extends beyond the buffer, or the offset does not fit the dtype.
        """
        count = prod(shape) * dtype.itemsize
        if offset < 0 or offset + count > self.size or offset % dtype.itemsize:
            raise ValueError(
                f"PeerBuffer.view: {count} bytes of {dtype} from {offset} on do not fit into {self.size} bytes, or do "
                "not start at a multiple of the dtype's size."
            )
        return self._buffers[rank][offset : offset + count].view(dtype).view(*shape)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Make the current stream wait for every rank's barrier; the host continues. A CUDA graph can contain it.

        Writes to any buffer before it are visible after it on all ranks. Every rank must call it equally often. Among
        the ranks of one process it does nothing: a `Collective` between their parts has this effect.

        Args:
            channel: barriers of different channels may overlap, those of one must not: one stream a channel.
            timeout_ms: after which waiting is a failure of the device that ends the process's use of it; 0: never.
        """
        if self._handle is not None:
            self._handle.barrier(channel=channel, timeout_ms=timeout_ms)


@dataclass(frozen=True)
class TransportChoice:
    """Chosen transport of rows between ranks.

    Attributes:
        name: `peer`: into each other's memory; `mixed`: inside each machine so, between machines by all-to-all;
            `collective`: by all-to-all.
        reason: why, for the user: a whole sentence.
    """

    name: Literal["peer", "mixed", "collective"]
    reason: str

    @property
    def peer(self) -> bool:
        """True if the ranks of a machine share peer memory."""
        return self.name != "collective"


def choose_transport(world: World, wanted: str = "auto", *, relayed: bool = False) -> TransportChoice:
    """Return how rows are exchanged, and why: the same on every rank. Every rank calls it.

    Peer memory takes GPUs of one machine, each with access to all others. A small buffer is tried out: written to and
    read from by all, with barriers between.

    Args:
        world: the ranks.
        wanted: `peer`, `collective`, or `auto`: peer where there is any. The same on every rank.
        relayed: over several machines rows are forwarded inside each (`Hierarchy`), for which peer memory serves.

    Raises:
        ValueError: `wanted` is something else.
        RuntimeError: `peer` is wanted and cannot be had; or the trial's barrier failed, which leaves the GPU unusable.
    """
    if wanted not in ("auto", "peer", "collective"):
        raise ValueError(f"The transport is {wanted!r}; it must be auto, peer or collective.")
    if wanted == "collective":
        return TransportChoice("collective", "Collectives were asked for.")
    if world.group is None:
        return TransportChoice("peer", "There is one rank, which uses its own memory.")
    mixed = relayed and 1 < world.local_size < world.size
    problem = _first_problem(_access_problem(world, machine=mixed), world) or _trial_problem(world, machine=mixed)
    if problem is None and mixed:
        return TransportChoice(
            "mixed", "Ranks access each other's memory inside each machine, not between machines."
        )
    if problem is None:
        return TransportChoice("peer", f"All {world.size} ranks access each other's memory.")
    if wanted == "peer":
        raise RuntimeError(
            f"The transport `peer` was asked for and cannot be had. {problem} "
            "Choose the transport `auto` or `collective`."
        )
    return TransportChoice("collective", f"There is no peer memory. {problem}")


def _access_problem(world: World, *, machine: bool) -> str | None:
    """Return the reason why this rank's GPU cannot access the others' memory, as a sentence; None if none is known.
    Collective.

    Args:
        machine: the others are those of its machine.
    """
    device = world.device
    identity = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    identities = cast(list[str | None], all_gather_objects(identity, world))
    if device.type != "cuda":
        return f"It computes on {device.type}; peer memory takes GPUs."
    if world.local_size != world.size and not machine:
        return f"{world.local_size} of {world.size} ranks are on its machine; peer memory takes all of them on one."
    seen = {str(torch.cuda.get_device_properties(k).uuid): k for k in range(torch.cuda.device_count())}
    for rank, other in enumerate(identities):
        if rank == world.rank or other is None or (machine and world.machine_of(rank) != world.machine):
            continue
        if other == identity and gpus_are_shared():
            continue
        if other == identity:
            return f"It shares its GPU with rank {rank}; each needs one of its own."
        if other not in seen:
            return f"It does not see the GPU of rank {rank}: let CUDA_VISIBLE_DEVICES name all GPUs on every rank."
        if not torch.cuda.can_device_access_peer(device, seen[other]):
            return f"Its GPU has no peer access to that of rank {rank} (`nvidia-smi topo -p2p r` shows the links)."
    return None


def _trial_problem(world: World, *, machine: bool) -> str | None:
    """Return the failure of a trial with a small buffer, as a sentence; None if it succeeds. Collective.

    Args:
        machine: it is shared by the ranks of a machine.

    Raises:
        RuntimeError: the barrier failed.
    """
    ranks, me = (world.local_size, world.local_rank) if machine else (world.size, world.rank)
    try:
        buffer = PeerBuffer(8 * ranks * ranks, world, machine=machine)
    except RuntimeError as error:  # raised by every rank
        return str(error)
    tables = [buffer.view(rank, 0, (ranks, ranks), torch.int64) for rank in range(ranks)]
    expected = torch.arange(ranks**2).view(ranks, ranks) + 1
    tables[me].zero_()
    torch.cuda.synchronize(world.device)
    barrier(world)
    # By kernels, as rows will be sent; row r of every table is rank r's to write. First with the host's barrier between,
    # which cannot hang a GPU.
    row = expected[me].to(world.device)
    for table in tables:
        table[me].add_(row)
    torch.cuda.synchronize(world.device)
    barrier(world)
    right = all(torch.equal((table + 0).cpu(), expected) for table in tables)
    if problem := _first_problem(None if right else "Data that GPUs wrote to each other's memory was not received.", world):
        return problem
    problem = None
    try:
        for table in tables:
            table[me].neg_()
        buffer.barrier(timeout_ms=TRIAL_TIMEOUT_MS)
        copies = [table + 0 for table in tables]
        torch.cuda.synchronize(world.device)
        if not all(torch.equal(copy.cpu(), -expected) for copy in copies):
            problem = "The barrier between GPUs does not order what they write to each other's memory."
    except RuntimeError as error:
        problem = f"The barrier between GPUs failed ({error})."
    if problem := _first_problem(problem, world):
        raise RuntimeError(f"{problem} Choose the transport `collective`.")
    return None


def _first_problem(problem: str | None, world: World) -> str | None:
    """Return the first rank's problem with its rank, or None without any. Every rank gets the same result."""
    problems = cast(list[str | None], all_gather_objects(problem, world))
    return next((f"Rank {rank}: {one}" for rank, one in enumerate(problems) if one is not None), None)


def _all_or_none(what: str, make: Callable[[], _T], world: World) -> _T:
    """Return the result of `make` if it succeeds on all ranks; otherwise raise the first failure on every rank."""
    result: list[_T] = []
    problem: str | None = None
    try:
        result.append(make())
    except Exception as error:
        problem = f"cannot {what} peer memory ({error})."
    if named := _first_problem(problem, world):
        raise RuntimeError(named)
    return result[0]


def _allocate(size: int, world: World) -> Tensor:
    # Before torch looks: a program that uses NVLink multicast can put the GPUs of a host out of service, and nothing
    # here needs it.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if gpus_are_shared():
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    from torch._C._distributed_c10d import _SymmetricMemory  # pyright: ignore[reportPrivateUsage] - not in every torch

    def allocate() -> Tensor:
        # Not symmetric_memory.empty: its pool hands out parts of what was freed, at offsets that could differ by rank.
        return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, world.device)

    try:
        return allocate()
    except RuntimeError:  # what torch's own allocator has free is not free for this one
        torch.cuda.empty_cache()
        return allocate()


def _rendezvous(local: Tensor, group: Any) -> Any:
    from torch.distributed import _symmetric_memory  # takes a moment

    assert group is not None
    return _symmetric_memory.rendezvous(local, group)


def _seen_from(device: torch.device, buffer: Tensor) -> Tensor:
    """Return a tensor of this device on a buffer of another, which it does not keep. Between tensors of two GPUs torch
    would copy on the streams of both, and not by a kernel of one."""
    if buffer.device == device:
        return buffer
    made: Any = torch._C._construct_storage_from_data_pointer  # pyright: ignore[reportPrivateUsage]
    seen: Any = torch.empty(0, dtype=buffer.dtype, device=device)
    return cast(Tensor, seen.set_(made(buffer.data_ptr(), device, buffer.nbytes), 0, buffer.shape))
