"""Parallel work on many views: in threads, or in processes if threads would block each other."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Job = TypeVar("Job")

_THREADS = 4
"""Largest number of rendering threads on a CPU. A picture is thousands of small operations, and each needs Python's
lock. Two threads use four fifths of two cores; thirty, on 32 cores, did not render 240 small views in 60 s.
"""


def side_by_side(
    work: Callable[[Job], int], jobs: Sequence[Job], workers: int, device: torch.device | str
) -> Iterator[int]:
    """Yield the result of `work` for each job, in order.

    Args:
        work: on one job. With many workers on a CPU it is sent to other processes: then it has to be picklable.
        jobs: to do. workers: so many at once. device: where the work is done.

    Raises:
        ValueError: workers is not positive.
    """
    if workers < 1:
        raise ValueError(f"workers: {workers}; give 1 or more")
    workers = min(workers, max(len(jobs), 1))
    if torch.device(device).type != "cpu" or workers <= _THREADS:
        with ThreadPoolExecutor(workers) as threads:
            yield from threads.map(work, jobs)
        return
    # Not forked from here: threads of this process may hold locks.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=_begin, initargs=(work,)) as processes:
        yield from processes.map(_do, jobs)


_work: Callable[[Any], int]
"""Task of a worker process: sent once, since a capture builds its scene on first use."""


def _begin(work: Callable[[Any], int]) -> None:
    """Initialize a worker process, which has one core."""
    global _work
    _work = work
    torch.set_num_threads(1)


def _do(job: Any) -> int:
    return _work(job)
