"""Entry of a trainer's process into the world, and checks of what ranks must share before anything is loaded."""

import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text

from ns_multigpu.core.dist.collectives import all_gather_objects, broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.agreement import check_same_start
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.launch.ranks import rendezvous_explained
from ns_multigpu.plugin.launch.run_parts import run_parts

_PATIENCE = 10.0
"""Seconds in which a file must show on the other machines: network file systems may take some of them."""


def enter_world(config: Any) -> World:
    """Return the world that this process's launcher describes, and make it this process's. Every rank calls it.

    Print which ranks are on which machine, and a warning of what is unlike.

    Args:
        config: a `DistributedTrainerConfig`.

    Raises:
        InputError: on every rank: the ranks were not started alike, or their machines do not share the run folder; or
            they cannot meet.
    """
    with rendezvous_explained():
        world = World.from_env(config.device_type)
    check_same_start(config, world)
    set_world(world)
    check_shared_folder(config.get_base_dir(), world)
    unlike = different_devices(device_kind(world.device), world)
    for line, style in ((machines_named(world), ""), (unlike, "yellow"), (restarts_in_vain(os.environ), "yellow")):
        if line:
            CONSOLE.print(Text(line, style), soft_wrap=True)
    if line := at_another_machine(world):
        print(line, flush=True)  # nerfstudio's console is rank 0's
    run_parts().done("device and rendezvous")
    return world


def check_shared_folder(folder: Path, world: World, patience: float = _PATIENCE) -> None:
    """Check that all machines share one writable run folder, because all write checkpoints. Every rank calls it.

    Rank 0 writes a file. Each other machine's first rank waits for it and writes one of its own, for which rank 0
    waits. A name is only looked up once its folder lists it: network file systems may cache a failed look-up for long.

    Args:
        folder: the run's, as this machine names it.
        patience: seconds that a file may take to show.

    Raises:
        InputError: on every rank, if a machine fails. It names the machine, the folder and the remedy.
    """
    if world.machines == 1:
        return
    probe = folder / broadcast_object(f".machines-{secrets.token_hex(4)}", 0, world)
    files, here = [probe / f"machine-{machine}" for machine in range(world.machines)], world.machine_name(world.machine)

    def ask() -> str:
        return _written(files[0], here) if world.is_main else ""

    def answer() -> str:
        if world.local_rank or world.is_main:
            return ""
        if not _shows(files[0], patience):
            return f"{here} does not see {folder} as rank 0 does" + ("" if folder.exists() else ": it is not there")
        return _written(files[world.machine], here)

    def hear() -> str:
        unseen = [machine for machine in range(1, world.machines) if not _shows(files[machine], patience)]
        return "; ".join(f"rank 0 does not see in {folder} what {world.machine_name(n)} writes there" for n in unseen)

    found: list[str] = []
    for ask_or_look in (ask, answer, hear if world.is_main else str):
        found = found or [line for line in all_gather_objects("" if found else ask_or_look(), world) if line]
    if world.is_main:
        shutil.rmtree(probe, ignore_errors=True)
    if found:
        raise InputError(
            "The machines do not share the run folder, where all of them write checkpoints:\n  "
            + "\n  ".join(found)
            + "\nPut it on a file system that every machine mounts in the same place (NFS, Lustre and the like), and "
            "name a folder there with --output-dir DIR."
        )


def _written(path: Path, here: str) -> str:
    """Write a file; return the error, "" on success."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        return f"{here} cannot write to {path.parent.parent}: {error.strerror or error}"
    return ""


def _shows(path: Path, patience: float) -> bool:
    """Return whether a file appears within some seconds."""
    end = time.monotonic() + patience
    while True:
        try:
            if path.name in os.listdir(path.parent):  # a listing is refreshed, a cached look-up may not be
                return True
        except OSError:
            pass
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)


def device_kind(device: torch.device) -> str:
    """Return a rank's GPU name and memory in GB; "" on a CPU."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.total_memory / 1e9:.0f} GB)"


def different_devices(kind: str, world: World) -> str:
    """Return a warning if the ranks' GPUs differ, else "". Every rank calls it.

    Args:
        kind: this rank's.
    """
    devices = all_gather_objects(kind, world)
    if len(set(devices)) == 1:
        return ""
    listed: list[str] = []
    for machine in range(world.machines):
        counted = Counter(devices[rank] for rank in world.ranks_of(machine))
        what = ", ".join(f"{count} x {name}" for name, count in counted.items())
        listed.append(f"{world.machine_name(machine)} has {what}")
    return (
        f"The GPUs are not all of a kind: {'; '.join(listed)}. All wait for the slowest, and the one with the least "
        "memory limits the model."
    )


def restarts_in_vain(environment: Mapping[str, str]) -> str:
    """Return a warning if torchrun was set to restart but cannot when a machine rejoins, else "".

    Its agents keep the address of the first store and do not share a new one (pytorch/pytorch#135712).

    Args:
        environment: this process's.
    """
    several = int(environment.get("GROUP_WORLD_SIZE", "1")) > 1
    asked = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if not (several and asked and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
        return ""
    return (
        "If a machine is lost, this run will not go on when it comes back: torchrun's --max-restarts restarts workers "
        "here, and no machines. For those give --rdzv-backend c10d, and set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on "
        "every machine."
    )


def machines_named(world: World) -> str:
    """Return the assignment of ranks to machines, in words; "" on one machine."""
    if world.machines == 1:
        return ""
    listed = [f"{world.machine_name(n)} has {_span(world.ranks_of(n))}" for n in range(world.machines)]
    return f"{world.machines} machines{' (pretended)' if world.pretended > 1 else ''}: {'; '.join(listed)}."


def at_another_machine(world: World) -> str:
    """Return the message of another machine's first rank; "" for other ranks and on rank 0's machine."""
    if world.machine == 0 or world.local_rank:
        return ""
    here, ranks = world.machine_name(world.machine), _span(world.ranks_of(world.machine))
    return f"This is {here}, with {ranks} of {world.size}. Progress is shown by {world.rank_name(0)}."


def _span(ranks: range) -> str:
    """Return a range of ranks in words, such as "ranks 2 to 3"."""
    return f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
