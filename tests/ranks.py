"""Runs a function on several ranks of one machine: gloo on CPU, NCCL on GPUs."""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ns_multigpu.core.collectives import barrier
from ns_multigpu.core.world import World


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    device: str = "cpu",
    seconds: int = 120,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Calls `function(world, *args)` on `size` new processes; returns what each returned, by rank.

    Functions and arguments must be picklable. A world of one runs in this process. The first rank that fails ends the
    others, and its traceback is the error. Modules to `preload` are imported once, by a server that the ranks are
    forked from, instead of once a rank: worth it for those that take seconds (CPU only).
    """
    if size == 1:
        return [function(World.single(device if device == "cpu" else "cuda:0"), *args)]
    with tempfile.TemporaryDirectory() as folder:
        method = "spawn"
        if preload:
            method = "forkserver"
            multiprocessing.set_forkserver_preload(list(preload))
        context = mp.start_processes(
            _rank, (size, device, folder, seconds, function, args), nprocs=size, join=False, start_method=method
        )
        while not context.join():  # returns each time a rank has ended
            pass
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(
    rank: int, size: int, device: str, folder: str, seconds: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ["GROUP_RANK"] = "0"
    torch.set_num_threads(1)
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=place if place.type == "cuda" else None,
    )
    world = World.from_groups(place, timeout)
    try:
        torch.save(function(world, *args), Path(folder) / f"{rank}.pt")
        barrier(world)  # a rank that leaves early takes its connections with it
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # Errors that a test has caught keep frames, and so process groups, whose threads may abort the interpreter.
        gc.collect()
        world.close()
