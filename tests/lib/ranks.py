"""Runs a function on several ranks of one machine: gloo on CPU, NCCL on GPUs, which ranks may be allowed to share."""

import gc
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import SHARE_GPUS, World, backend_of, gpu_places
from ns_multigpu.plugin.launch.processes import RankProcesses, preload

PRELOADED = [
    *(f"tests.lib.{name}" for name in ("rendering", "resuming", "saving", "sharding", "tile_training_run")),
    *("tests.lib.ranks", "nerfstudio.scripts.render"),  # pytest and IPython, among others
    "tests.lib.unmoved",  # the last
]
"""Modules whose imports take seconds."""
preload(PRELOADED)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on_gpus(*values: Any) -> Any:
    """Return parameters of a test, the last of them its device: "cuda"."""
    return pytest.param(*values, "cuda", marks=pytest.mark.gpu)


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, device: str = "cpu", seconds: int = 300, fork: bool = True
) -> list[Any]:
    """Call `function(world, *args)` on `size` new processes; returns what each returned, by rank.

    Functions and arguments must be picklable. A world of one runs in this process. The first rank that fails ends the
    others, and its traceback is the error. On CPUs a server with all imports done forks the ranks, unless `fork` is
    False. They have this process's environment, and nothing else of it.

    The test is skipped where there is not a GPU for each rank and none may be shared.
    """
    if device == "cuda" and gpu_places() < size:
        pytest.skip(f"needs {size} GPUs, or {SHARE_GPUS}=1; torch sees {torch.cuda.device_count()}")
    if size == 1:
        return [function(World.single(device if device == "cpu" else "cuda:0"), *args)]
    with tempfile.TemporaryDirectory() as folder:
        fork = fork and device == "cpu"  # this process may have used CUDA, and the server what it imports
        ranks = RankProcesses(_rank, (device, folder, seconds, function, args), size, threads=1, fork=fork)
        try:
            ranks.wait(grace=5.0)
        finally:
            ranks.end()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(device: str, folder: str, seconds: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    world = World.from_env(device, timedelta(seconds=seconds))
    try:
        torch.save(function(world, *args), Path(folder) / f"{world.rank}.pt")
        barrier(world)  # a rank that leaves early takes its connections with it
    except BaseException:
        if backend_of(device) == "nccl":  # else closing would wait for ranks that wait for this one
            dist.distributed_c10d._abort_process_group()
        raise
    finally:
        # Errors that a test has caught keep frames, and so process groups, whose threads may abort the interpreter.
        gc.collect()
        world.close()
