# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false
"""This process's place among the others.

A world of one has no process group and its collectives do nothing: the code above never asks whether it is distributed.
"""

import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from ns_multigpu.core.types import Traffic

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""How long a collective may wait for a rank before the job is called hung."""

SHARE_GPUS = "NS_MULTIGPU_SHARE_GPUS"
"""Set to 1 in the environment it lets several ranks share a GPU, to try out more ranks than there are GPUs. It is slow:
they take turns, and collectives go through host memory, for NCCL wants a GPU for each rank."""

ProcessGroup = dist.ProcessGroup


@dataclass(frozen=True)
class World:
    """Rank, size, device and process groups of this process.

    Attributes:
        rank, size: among all processes of the job.
        local_rank, local_size: among those of this machine.
        device: where this rank computes.
        group: all ranks, NCCL on CUDA (gloo where ranks share GPUs) and gloo on CPU; None in a world of one.
        local_group: the ranks of this machine, same backend; None in a world of one.
        control: all ranks, gloo on host memory, for decisions that must not touch the device; None in a world of one.
        traffic: bytes this rank has sent.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    group: ProcessGroup | None = None
    local_group: ProcessGroup | None = None
    control: ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank of the job that writes files and speaks to the user."""
        return self.rank == 0

    @property
    def machines(self) -> int:
        """How many there are; each has as many ranks, and those of one follow one another."""
        return max(1, self.size // max(self.local_size, 1))

    @staticmethod
    def single(device: torch.device | str = "cpu") -> "World":
        """A world of one on `device`; "cuda" without a number is the current GPU."""
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:  # pyright: ignore[reportUnnecessaryComparison]
            place = torch.device("cuda", torch.cuda.current_device())
        return World(0, 1, 0, 1, place)

    @staticmethod
    def from_env(
        device_type: str, timeout: timedelta = DEFAULT_TIMEOUT, control_timeout: timedelta | None = None
    ) -> "World":
        """The world that a launcher described in the environment, as torchrun does; a world of one if none did.

        Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and the rendezvous variables of torch.distributed, and
        initialises the default process group unless that has been done.

        Args:
            device_type: "cuda" or "cpu".
            timeout: after which a collective that waits for another rank fails.
            control_timeout: the same for the control group, if another: a rank that leads may think for hours.

        Raises:
            RuntimeError: this rank's GPU does not exist.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if device_type == "cuda":
            if local_rank >= gpu_places():
                count = torch.cuda.device_count()
                raise RuntimeError(
                    f"local rank {local_rank} has no GPU: this machine has {count}. "
                    f"Start at most {count} ranks here, or choose --machine.device-type cpu."
                )
            device = gpu_of(local_rank)
            torch.cuda.set_device(device)
        else:
            device = torch.device(device_type)
        if size == 1 and "RANK" not in os.environ:
            return World.single(device)
        if not dist.is_initialized():
            store, rank, _ = next(iter(dist.rendezvous("env://", timeout=timeout)))
            backend = backend_of(device_type)
            dist.init_process_group(
                backend,
                timeout=timeout,
                store=store_of_this_life(store),
                rank=rank,
                world_size=size,
                device_id=device if backend == "nccl" else None,
            )
        if dist.get_world_size() == 1:
            return World.single(device)
        return World.from_groups(device, timeout, control_timeout)

    @staticmethod
    def from_groups(
        device: torch.device, timeout: timedelta = DEFAULT_TIMEOUT, control_timeout: timedelta | None = None
    ) -> "World":
        """The world of an initialised default process group. Every rank of it must call this.

        Machines are told apart by GROUP_RANK, which torchrun sets; without it all ranks count as one machine's.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        control = _new_group(None, control_timeout or timeout, backend="gloo")
        machine = torch.tensor([int(os.environ.get("GROUP_RANK", "0"))])
        machines = [torch.zeros_like(machine) for _ in range(size)]
        dist.all_gather(machines, machine, group=control)
        ids = [int(m.item()) for m in machines]
        local_group: ProcessGroup | None = None
        for one in sorted(set(ids)):
            # Every rank takes part in the making of every group, its own or not: torch.distributed asks for that.
            group = _new_group([r for r in range(size) if ids[r] == one], timeout)
            if one == ids[rank]:
                local_group = group
        neighbours = [r for r in range(size) if ids[r] == ids[rank]]
        return World(
            rank=rank,
            size=size,
            local_rank=neighbours.index(rank),
            local_size=len(neighbours),
            device=device,
            group=dist.group.WORLD,
            local_group=local_group,
            control=control,
        )

    def close(self) -> None:
        """Ends the process groups, if this world has any."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()


def gpus_are_shared() -> bool:
    """Whether `SHARE_GPUS` is set.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    value = os.environ.get(SHARE_GPUS, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{SHARE_GPUS}={value}: must be 1, to let ranks share GPUs, or 0.")
    return value == "1"


def gpu_places() -> int:
    """How many ranks this machine's GPUs have room for: one each, unless they are shared."""
    count = torch.cuda.device_count()
    return sys.maxsize if count and gpus_are_shared() else count


def gpu_of(local_rank: int) -> torch.device:
    """The GPU of a rank of this machine; there must be one."""
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def backend_of(device_type: str) -> str:
    """What collectives of tensors on "cuda" or "cpu" go through."""
    return "nccl" if device_type == "cuda" and not gpus_are_shared() else "gloo"


def store_of_this_life(store: dist.Store) -> dist.Store:
    """`store` without what an earlier life of this job has left in it.

    torchrun's default (static) rendezvous keeps one store through all restarts, addresses of dead workers included.
    Over several machines each agent counts for itself, and every round of a dynamic rendezvous has a new store.
    """
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return dist.PrefixStore(f"ns_multigpu/life/{life}", store) if alone and life != "0" else store


def _new_group(ranks: list[int] | None, timeout: timedelta, backend: str | None = None) -> ProcessGroup:
    return cast(ProcessGroup, dist.new_group(ranks, timeout=timeout, backend=backend))
