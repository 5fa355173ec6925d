"""Rank of this process in its job, by its launcher's environment, and agreement of ranks at the start."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ns_multigpu.core.dist.machines import Layout, Place, layout_of
from ns_multigpu.core.dist.rendezvous import store_of_attempt
from ns_multigpu.core.dist.world import own_place
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.agreement import refuse_differences

_PATIENCE = timedelta(minutes=10)
_stores: list[dist.Store] = []  # kept open: where rank 0 serves the store itself, the process group joins it later


@dataclass(frozen=True)
class Ranks:
    """Rank of this process in a job started by torchrun, or by a launcher with the same environment variables.

    Attributes:
        rank, size: among all processes.
        local_rank, local_size: among those of this machine.
        machines: how many machines take part.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    machines: int

    @staticmethod
    def from_env() -> "Ranks | None":
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_WORLD_SIZE; None if no launcher set them."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None

        def number(name: str, default: str) -> int:
            return int(os.environ.get(name, default))

        return Ranks(
            rank=number("RANK", "0"),
            size=number("WORLD_SIZE", "1"),
            local_rank=number("LOCAL_RANK", "0"),
            local_size=number("LOCAL_WORLD_SIZE", "1"),
            machines=number("GROUP_WORLD_SIZE", "1"),
        )


@dataclass(frozen=True)
class Start:
    """Start of a rank, as published at the rendezvous.

    Attributes:
        place: its machine and device.
        agent: globally unique name of the process that started it; "" if unknown.
        restarts: number of restarts by that process.
    """

    place: Place
    agent: str = ""
    restarts: int = 0

    @staticmethod
    def of_this_process() -> "Start":
        """Return the start of this process.

        Raises:
            InputError: its environment is inconsistent.
        """
        try:
            place = own_place()
        except ValueError as error:
            raise InputError(str(error)) from error
        return Start(place, agent(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def agent() -> str:
    """Return the process that started this one, as machine, number and start time; "" if unknown."""
    parent = os.getppid()
    try:
        # The 20th word behind the name, which may hold anything but this bracket last.
        began = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        began = ""
    return f"{socket.gethostname()} {parent} {began}"


def check_layout(places: Sequence[Place]) -> Layout:
    """Return the layout of ranks on machines.

    Args:
        places: by rank.

    Raises:
        InputError: the layout is invalid; see `layout_of`.
    """
    try:
        return layout_of(places)
    except ValueError as error:
        raise InputError(str(error)) from error


def agree(
    ranks: Ranks,
    decide: Callable[[Sequence[Start]], str],
    patience: timedelta = _PATIENCE,
    manifest: Mapping[str, str] | None = None,
) -> str:
    """Return rank 0's result of `decide` on every rank; an `InputError` that it raises there is raised on all.

    It uses the launcher's rendezvous before there is a process group, with its own prefix of keys.

    Args:
        ranks: this process's place.
        decide: called on rank 0, with what each rank says of its start, once the ranks are known to lie on machines as
            they must.
        patience: how long to wait for the other ranks.
        manifest: what this rank was started with (see `agreement`); all must be equal.

    Raises:
        InputError: `decide` raised it, the ranks were not started alike, or they cannot meet.
    """
    start = Start.of_this_process()
    with rendezvous_explained():
        store = _meet(patience)
        _stores.append(store)
        life = store_of_attempt(store, ranks.rank, ranks.size, patience)
    ours = dist.PrefixStore("ns_multigpu/start", life)
    ours.set(f"start/{ranks.rank}", json.dumps([dict(manifest or {}), asdict(start)]))
    if ranks.rank != 0:
        answer = json.loads(ours.get("answer"))
        ours.add("heard", 1)
        if "error" in answer:
            raise InputError(answer["error"])
        return str(answer["value"])
    try:
        with rendezvous_explained():
            received = [json.loads(ours.get(f"start/{rank}")) for rank in range(ranks.size)]
        starts = [Start(**{**one, "place": Place(**one["place"])}) for _, one in received]
        check_layout([one.place for one in starts])
        refuse_differences([one for one, _ in received])
        value = decide(starts)
    except InputError as error:
        ours.set("answer", json.dumps({"error": str(error)}))
        # This process is about to end, and may take the store with it: let the others hear first.
        end = time.monotonic() + 10
        while ours.add("heard", 0) < ranks.size - 1 and time.monotonic() < end:
            time.sleep(0.05)
        raise
    ours.set("answer", json.dumps({"value": value}))
    return value


def _meet(patience: timedelta) -> dist.Store:
    """Return the store that the launcher or rank 0 serves.

    In a thread, because torch waits for ever for the answer of a stranger that listens on rank 0's port.
    """
    outcome: list[dist.Store | Exception] = []

    def attempt() -> None:
        try:
            outcome.append(next(iter(dist.rendezvous("env://", timeout=patience)))[0])
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(patience.total_seconds() + 1)
    if not outcome:
        raise dist.DistNetworkError(f"no answer within {patience.total_seconds():.0f} s.")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


@contextlib.contextmanager
def rendezvous_explained() -> Iterator[None]:
    """Replace rendezvous errors by messages that name the address and the remedy.

    Raises:
        InputError: rank 0's port is in use, or rank 0 does not answer.
    """
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        host, port = os.environ.get("MASTER_ADDR", "?"), os.environ.get("MASTER_PORT", "?")
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise InputError(
                f"Port {port} on {host}, where the ranks are to meet, is in use: by another program, or by a run that "
                f"has not ended (`ss -ltnp 'sport = :{port}'` shows it). End that, or choose another port: "
                f"torchrun --master-port {_another(port)}, or MASTER_PORT={_another(port)} for ranks started without "
                "torchrun; the same on every machine."
            ) from error
        raise InputError(
            f"Rank {os.environ.get('RANK', '?')} cannot meet the others at {host}:{port}: {str(error).splitlines()[0]} "
            "See to it that all ranks were started, that MASTER_ADDR and MASTER_PORT (torchrun --master-addr, "
            "--master-port) are rank 0's on every machine, and that no firewall and no other program is in between."
        ) from error


def _another(port: str) -> str:
    return str(int(port) + 1 if port.isdigit() and int(port) < 65535 else 29501)
