"""Runs a function on several ranks of one machine: gloo on CPU, NCCL on GPUs, which ranks may be allowed to share."""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ns_multigpu.core.collectives import barrier
from ns_multigpu.core.world import SHARE_GPUS, World, backend_of, gpu_of, gpu_places

PRELOADED = [
    *(f"tests.plugin.{name}" for name in ("rendering", "resuming", "saving", "sharding", "tile_course")),
    *("tests.ranks", "nerfstudio.scripts.render"),  # pytest and IPython, among others
    "tests.unmoved",  # the last
]
"""What takes seconds to import is among what these import. A server of ranks has one list: the first it is given."""


def skip_without_gpus(ranks: int) -> None:
    """Skips a test, saying why, where there is not a GPU for each rank and none may be shared."""
    if gpu_places() < ranks:
        pytest.skip(f"needs {ranks} GPUs, or {SHARE_GPUS}=1; torch sees {torch.cuda.device_count()}")


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, device: str = "cpu", seconds: int = 300, fork: bool = True
) -> list[Any]:
    """Calls `function(world, *args)` on `size` new processes; returns what each returned, by rank.

    Functions and arguments must be picklable. A world of one runs in this process. The first rank that fails ends the
    others, and its traceback is the error. On CPUs a server that has imported what all need forks the ranks, unless
    told not to `fork`: they have this process's environment, and else nothing of it.
    """
    if size == 1:
        return [function(World.single(device if device == "cpu" else "cuda:0"), *args)]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(PRELOADED)
        method = "forkserver" if fork and device == "cpu" else "spawn"  # CUDA does not outlive a fork
        what = (size, device, folder, seconds, dict(os.environ), function, args)
        context = mp.start_processes(_rank, what, nprocs=size, join=False, start_method=method)
        while not context.join():  # returns each time a rank has ended
            pass
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(
    rank: int,
    size: int,
    device: str,
    folder: str,
    seconds: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update({**environment, "GROUP_RANK": "0"})
    torch.set_num_threads(1)
    place = torch.device("cpu") if device == "cpu" else gpu_of(rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    timeout, backend = timedelta(seconds=seconds), backend_of(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=place if backend == "nccl" else None,
    )
    world = World.from_groups(place, timeout)
    try:
        torch.save(function(world, *args), Path(folder) / f"{rank}.pt")
        barrier(world)  # a rank that leaves early takes its connections with it
    except BaseException:
        traceback.print_exc()
        if backend == "nccl":  # else closing would wait for ranks that wait for this one
            dist.distributed_c10d._abort_process_group()
        raise
    finally:
        # Errors that a test has caught keep frames, and so process groups, whose threads may abort the interpreter.
        gc.collect()
        world.close()
