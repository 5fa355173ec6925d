# pyright: reportPrivateImportUsage=false
"""Rendezvous of ranks on a store that may contain data of earlier attempts of their job.

A launcher that restarts a job's processes may keep its store, with the addresses of dead processes. It has no number
that distinguishes attempts on all machines. torchrun counts restarts per agent, and an agent that joined later began at
0 (pytorch/pytorch#135712). So the ranks agree on a name for their attempt and use only the keys under it.
"""

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_PAUSE = 0.02
"""Seconds between two looks."""


def store_of_attempt(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return the part of `store` that only the processes of this start of the job use. Every rank calls it, equally
    often.

    Each rank publishes a unique mark. Rank 0 reads all marks and answers with them and a name. A rank that finds its
    own mark in the answer confirms it. Marks of dead processes stay unconfirmed until live processes replace them.

    Args:
        store: one that all ranks can access. rank, size: this process's place.
        timeout: how long to wait for the others.

    Raises:
        torch.distributed.DistStoreError: they have not all come by then; rank 0's names those that have not.
    """
    store_of_run, mine = dist.PrefixStore("ns_multigpu/meeting", store), uuid.uuid4().hex
    store_of_run.set(f"mark/{rank}", mine)
    end = time.monotonic() + timeout.total_seconds()
    life = _invite(store_of_run, size, end) if rank == 0 else _follow(store_of_run, rank, mine, end)
    return dist.PrefixStore(f"ns_multigpu/life/{life}", store)


def _invite(store_of_run: dist.Store, size: int, end: float) -> str:
    marks, life = [""] * size, ""
    while True:
        present = [store_of_run.get(f"mark/{r}").decode() if store_of_run.check([f"mark/{r}"]) else "" for r in range(size)]
        if all(present) and present != marks:
            marks, life = present, uuid.uuid4().hex
            store_of_run.set("answer", json.dumps([life, marks]))
        here = [bool(life) and store_of_run.check([f"confirmed/{life}/{rank}"]) for rank in range(1, size)]
        if life and all(here):
            store_of_run.set(f"begun/{life}", "")
            return life
        if time.monotonic() > end:
            unmarked = [rank for rank in range(1, size) if not present[rank]]
            lacking = unmarked or [rank for rank in range(1, size) if not here[rank - 1]]
            raise dist.DistStoreError(f"rank{'s' if len(lacking) > 1 else ''} {str(lacking)[1:-1]} did not come.")
        time.sleep(_PAUSE)


def _follow(store_of_run: dist.Store, rank: int, mine: str, end: float) -> str:
    while True:
        if store_of_run.check(["answer"]):
            life, marks = json.loads(store_of_run.get("answer"))
            if rank < len(marks) and marks[rank] == mine:
                store_of_run.set(f"confirmed/{life}/{rank}", "")
                if store_of_run.check([f"begun/{life}"]):
                    return str(life)
        if time.monotonic() > end:
            raise dist.DistStoreError("rank 0, or another, did not come.")
        time.sleep(_PAUSE)
