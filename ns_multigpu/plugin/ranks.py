"""Which rank of a job this process is, as its launcher says, and what the ranks agree on at the start."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ns_multigpu.plugin.errors import InputError

_PATIENCE = timedelta(minutes=10)
_stores: list[dist.Store] = []  # kept open: where rank 0 serves the store itself, the process group joins it later


@dataclass(frozen=True)
class Ranks:
    """This process's place in a job that torchrun, or a launcher that speaks its language, has started.

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
        """Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_WORLD_SIZE; None if no launcher set them."""
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


def agree(ranks: Ranks, decide: Callable[[], str], patience: timedelta = _PATIENCE) -> str:
    """What `decide` returns on rank 0, on every rank; an `InputError` that it raises there is raised everywhere.

    Goes through the rendezvous that the launcher set up, before there is a process group and under a prefix of its
    own, so that it meets none of the group's keys.

    Raises:
        InputError: `decide` raised it.
    """
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=patience)))
    _stores.append(store)
    ours = dist.PrefixStore(f"ns_multigpu/start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if ranks.rank != 0:
        answer = json.loads(ours.get("answer"))
        ours.add("heard", 1)
        if "error" in answer:
            raise InputError(answer["error"])
        return str(answer["value"])
    try:
        value = decide()
    except InputError as error:
        ours.set("answer", json.dumps({"error": str(error)}))
        # This process is about to end, and may take the store with it: let the others hear first.
        end = time.monotonic() + 10
        while ours.add("heard", 0) < ranks.size - 1 and time.monotonic() < end:
            time.sleep(0.05)
        raise
    ours.set("answer", json.dumps({"value": value}))
    return value
