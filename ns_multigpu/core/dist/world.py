# pyright: reportPrivateImportUsage=false
"""World of a process: its rank, the number of ranks, its device and its process groups.

A world of one rank has no process group and its collectives do nothing, so callers never check whether they are
distributed.
"""

import os
import socket
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from ns_multigpu.core.dist.machines import PRETEND_MACHINES, Place, layout_of
from ns_multigpu.core.dist.rendezvous import store_of_attempt
from ns_multigpu.core.types import Traffic

if TYPE_CHECKING:
    from ns_multigpu.core.dist.members import Members

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""Timeout of a collective before the job counts as hung."""

SHARE_GPUS = "NS_MULTIGPU_SHARE_GPUS"
"""Set to 1 in the environment it lets several ranks share a GPU, to try out more ranks than there are GPUs. It is slow:
they take turns, and collectives go through host memory, for NCCL wants a GPU for each rank."""

# PRETEND_MACHINES, NS_MULTIGPU_MACHINES in the environment: set to 2 it lets one machine pass for two, to try out what
# a run over machines does. Its ranks are distributed in their order, half of them to each. GPUs, memory and processors
# stay the one machine's: nothing gets slower, as it would on a real link.

ProcessGroup = dist.ProcessGroup


@dataclass(frozen=True)
class World:
    """Rank, size, device and process groups of this process.

    Attributes:
        rank, size: among all processes of the job.
        local_rank, local_size: among those of this machine.
        device: where this rank computes.
        group: all ranks, NCCL on CUDA (gloo where ranks share GPUs) and gloo on CPU; None in a world of one.
        local_group: the ranks of this machine, same backend; `group` if there is one machine; None in a world of one.
        control: all ranks, gloo on host memory, for decisions that must not touch the device; None in a world of one.
        traffic: bytes this rank has sent.
        hosts: the machines' names, by number; empty if unknown.
        pretended: how many of the machines are one machine in truth (see PRETEND_MACHINES).
        members: all ranks, if they belong to one process; without groups. None if each has a process of its own.

    The ranks of a machine follow one another, and every machine has equally many.
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
    hosts: tuple[str, ...] = ()
    pretended: int = 1
    members: "Members | None" = field(default=None, repr=False, compare=False)

    @property
    def machine(self) -> int:
        """The number of this rank's machine."""
        return self.rank // self.local_size

    @property
    def machines(self) -> int:
        """Number of machines."""
        return max(1, self.size // self.local_size)

    @property
    def host_size(self) -> int:
        """Ranks that share this machine's memory and processors: `local_size`, unless machines are pretended."""
        return self.local_size * self.pretended

    def machine_of(self, rank: int) -> int:
        """Return the number of a rank's machine."""
        return rank // self.local_size

    def ranks_of(self, machine: int) -> range:
        """Return the ranks of a machine."""
        return range(machine * self.local_size, (machine + 1) * self.local_size)

    def machine_name(self, machine: int) -> str:
        """Return a machine's name for messages: "machine 1 (node7)"."""
        host = f" ({self.hosts[machine]})" if machine < len(self.hosts) else ""
        return f"machine {machine}{host}"

    def rank_name(self, rank: int) -> str:
        """Return a rank's name for messages: "rank 3", or "rank 3 on machine 1 (node7)" if there are several."""
        return f"rank {rank}" + (f" on {self.machine_name(self.machine_of(rank))}" if self.machines > 1 else "")

    @property
    def is_main(self) -> bool:
        """True if this is rank 0 of the job, which prints, logs and writes all files but the shards of checkpoints."""
        return self.rank == 0

    @staticmethod
    def single(device: torch.device | str = "cpu") -> "World":
        """Return a world of one rank on `device`; "cuda" without a number is the current GPU."""
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:  # pyright: ignore[reportUnnecessaryComparison]
            place = torch.device("cuda", torch.cuda.current_device())
        return World(0, 1, 0, 1, place)

    @staticmethod
    def from_env(
        device_type: str, timeout: timedelta = DEFAULT_TIMEOUT, control_timeout: timedelta | None = None
    ) -> "World":
        """Return the world that a launcher such as torchrun described in the environment, or else a world of one rank.

        Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and the rendezvous variables of torch.distributed, and
        initialises the default process group unless that has been done.

        Args:
            device_type: "cuda" or "cpu".
            timeout: after which a collective that waits for another rank fails.
            control_timeout: the same for the control group, if another: a rank that leads may think for hours.

        Raises:
            RuntimeError: this rank's GPU does not exist.
            ValueError: the machines have unequally many ranks, or others cannot be pretended; see `layout_of`.
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
                store=store_of_attempt(store, rank, size, timeout),
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
        """Return the world of an initialised default process group. Every rank of the group must call this.

        Machines are identified by GROUP_RANK, which torchrun sets; without it all ranks count as one machine's.

        Raises:
            ValueError: on every rank; see `layout_of`.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        control = _new_group(None, control_timeout or timeout, backend="gloo")
        places: list[Place] = [own_place()] * size
        dist.all_gather_object(places, own_place(), group=control)
        layout = layout_of(places)
        per_machine = layout.per_machine
        local_group: ProcessGroup | None = dist.group.WORLD
        if per_machine < size:  # else another communicator would cost a start time, and each GPU memory
            for first in range(0, size, per_machine):
                # Every rank takes part in the making of every group, its own or not: torch.distributed asks for that.
                group = _new_group(list(range(first, first + per_machine)), timeout)
                if first <= rank < first + per_machine:
                    local_group = group
        return World(
            rank=rank,
            size=size,
            local_rank=rank % per_machine,
            local_size=per_machine,
            device=device,
            group=dist.group.WORLD,
            local_group=local_group,
            control=control,
            hosts=layout.hosts,
            pretended=layout.pretended,
        )

    def close(self) -> None:
        """Destroy the process groups, if this world has any."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()


def gpus_are_shared() -> bool:
    """Return True if `SHARE_GPUS` is set.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    value = os.environ.get(SHARE_GPUS, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{SHARE_GPUS}={value}: must be 1, to let ranks share GPUs, or 0.")
    return value == "1"


def gpu_places() -> int:
    """Return the number of ranks for this machine's GPUs: one each, unless they are shared."""
    count = torch.cuda.device_count()
    return sys.maxsize if count and gpus_are_shared() else count


def gpu_of(local_rank: int) -> torch.device:
    """Return the GPU of a local rank. The machine must have a GPU."""
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def backend_of(device_type: str) -> str:
    """Return the backend of collectives for tensors on "cuda" or "cpu"."""
    return "nccl" if device_type == "cuda" and not gpus_are_shared() else "gloo"


def pretended_machines() -> int:
    """Return the value of `PRETEND_MACHINES`; 1 if it is not set.

    Raises:
        ValueError: it is no number from 1 on.
    """
    value = os.environ.get(PRETEND_MACHINES, "1")
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"{PRETEND_MACHINES}={value}: must be the number of machines that this one is to pass for.")
    return int(value)


def own_place() -> Place:
    """Return the place of this process."""
    return Place(int(os.environ.get("GROUP_RANK", "0")), socket.gethostname(), pretended_machines())


def _new_group(ranks: list[int] | None, timeout: timedelta, backend: str | None = None) -> ProcessGroup:
    return cast(ProcessGroup, dist.new_group(ranks, timeout=timeout, backend=backend))
