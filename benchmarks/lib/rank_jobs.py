"""Runs jobs on several ranks of this machine, one after the other, so that what breaks or hangs costs one job.

The ranks are new processes. Rank 0 writes each result to a file as soon as it is there; this process reads them. If a
rank fails the others are ended, and the jobs that are left go to new ranks.
"""

import contextlib
import gc
import json
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ns_multigpu.core.dist.collectives import barrier, broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.launch.processes import RankFailed, RankProcesses

Job = dict[str, Any]
"""Job description as JSON. `estimate`: minimum remaining seconds to begin it. `way`: name of its variant."""
Emit = Callable[[int, Job], None]
"""Called on rank 0 with a job's number and its result."""
Maker = Callable[[World, Job], Callable[[Job], Job]]
"""Called on each rank with what all jobs share; returns what does a job."""

_TIMEOUT = timedelta(minutes=5)
_NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
}
"""Variables by which NCCL and torch keep off NVLink multicast, which nothing here needs."""
_CAUSE = "first-failure.txt"
"""File with the error message of the rank that failed first."""
_MOST_FAILURES = 2
"""Of the ranks by jobs of one `way`, after which its others are left out: new ranks take seconds."""


class JobFailed(RuntimeError):
    """Raised by a job on every rank at once: the ranks go on with the next one."""


def run_jobs(
    make: Maker, shared: Job, jobs: Sequence[Job], size: int, device: str, emit: Emit, deadline: float, stall: float
) -> None:
    """Run all jobs on `size` ranks. A failed one has `error` in its result, one without time left `skipped`.

    Args:
        make: found by the ranks under its name: a function of a module.
        shared: for `make`.
        jobs: in their order.
        size: ranks. A world of one on a CPU runs in this process.
        device: "cuda" or "cpu".
        emit: takes the results.
        deadline: `time.time()` after which no job is begun.
        stall: seconds without a result after which the ranks are ended.
    """
    if size == 1 and device == "cpu":
        _work(World.single("cpu"), make, shared, list(enumerate(jobs)), emit, deadline)
        return
    left = list(enumerate(jobs))
    broken: Counter[str] = Counter()
    while left:
        done, failed = _spawned(make, shared, left, size, device, emit, deadline, stall)
        if failed is not None:
            broken[jobs[failed].get("way", "")] += 1
        left = [one for one in left if one[0] not in done]
        hopeless = {way for way, times in broken.items() if way and times >= _MOST_FAILURES}
        for number, job in left:
            if job.get("way") in hopeless:
                emit(number, {"skipped": f"{job['way']} has ended the ranks {_MOST_FAILURES} times"})
        left = [one for one in left if one[1].get("way") not in hopeless]


def _spawned(
    make: Maker, shared: Job, jobs: list[tuple[int, Job]], size: int, device: str, emit: Emit, deadline: float,
    stall: float,
) -> tuple[set[int], int | None]:  # fmt: skip
    """Start ranks. Return the numbers of the jobs that ended, at least one, and of the job that stopped the ranks, if
    any."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        results.touch()
        what = (size, device, folder, make, shared, jobs, deadline)
        ranks = RankProcesses(_rank, what, size, threads=1, variables=_NO_MULTICAST, fork=False)
        done: set[int] = set()
        begun, read, since, problem = jobs[0][0], 0, time.monotonic(), ""
        while True:
            ended = False
            try:
                ended = ranks.wait(0.3, grace=5.0)
            except RankFailed as error:
                # The reported failure may be a consequence of another rank's.
                cause = Path(folder) / _CAUSE
                problem = cause.read_text() if cause.exists() else str(error)
            lines = results.read_text().split("\n")[:-1]
            for line in lines[read:]:
                since, message = time.monotonic(), json.loads(line)
                if "begun" in message:
                    begun = message["begun"]
                    continue
                done.add(message["number"])
                emit(message["number"], message["result"])
            read = len(lines)
            if ended or problem:
                break
            if time.monotonic() - since > stall:
                problem = f"no rank came to a result for {stall:.0f} s"
                ranks.end()
                break
    left = [number for number, _ in jobs if number not in done]
    if not left:
        return done, None
    failed = begun if begun in left else left[0]
    emit(failed, {"error": problem or "the ranks ended before it was done"})
    return done | {failed}, failed


def _rank(
    size: int, device: str, folder: str, make: Maker, shared: Job, jobs: list[tuple[int, Job]], deadline: float
) -> None:
    world = World.from_env(device, _TIMEOUT) if size > 1 else World.single("cuda:0" if device == "cuda" else device)
    results = Path(folder) / "results.jsonl"

    def write(message: Job) -> None:
        with results.open("a") as file:
            file.write(json.dumps(message) + "\n")

    def begin(number: int) -> None:
        write({"begun": number})

    try:
        _work(world, make, shared, jobs, lambda n, r: write({"number": n, "result": r}), deadline, begin)
    except Exception:
        with contextlib.suppress(FileExistsError), (Path(folder) / _CAUSE).open("x") as file:
            file.write(traceback.format_exc())
        raise
    world.close()


def _work(
    world: World, make: Maker, shared: Job, jobs: list[tuple[int, Job]], emit: Emit, deadline: float,
    begin: Callable[[int], None] = lambda _: None,
) -> None:  # fmt: skip
    do = make(world, shared)
    for number, job in jobs:
        late = broadcast_object(time.time() + job.get("estimate", 0.0) > deadline, 0, world)
        if late:
            result: Job = {"skipped": "no time left"}
        else:
            if world.is_main:
                begin(number)
            began = time.perf_counter()
            result = _attempt(do, job, world) | {"seconds": round(time.perf_counter() - began, 2)}
        if world.is_main:
            emit(number, result)
    barrier(world)  # a rank that leaves early takes its connections with it


def _attempt(do: Callable[[Job], Job], job: Job, world: World) -> Job:
    try:
        return do(job)
    except JobFailed as error:
        problem = str(error)
    except torch.OutOfMemoryError as error:
        if world.size > 1:  # the others may wait for this rank
            raise
        problem = f"out of memory: {str(error).splitlines()[0]}"
    except Exception:
        if world.size > 1:
            traceback.print_exc()
            raise
        if world.device.type == "cuda":  # which may be unusable now
            raise
        problem = traceback.format_exc(limit=-4)
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"error": problem}
