"""Work on many views at once: in threads, or in processes where threads would wait for each other."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import TypeVar

import torch

Job = TypeVar("Job")

_THREADS = 4
"""So many threads at most render on a CPU. A picture is thousands of small operations, between which a thread needs
Python's lock: thirty threads are slower than two."""


def side_by_side(
    work: Callable[[Job], int], jobs: Sequence[Job], workers: int, device: torch.device | str
) -> Iterator[int]:
    """What `work` returns for each job, in their order.

    Args:
        work: on one job. With many workers on a CPU it is sent to other processes: then it has to be picklable.
        jobs: to do. workers: so many at once. device: where the work is done.

    Raises:
        ValueError: workers is not positive.
    """
    if workers < 1:
        raise ValueError(f"workers: {workers}; give 1 or more")
    with _pool(min(workers, max(len(jobs), 1)), torch.device(device)) as pool:
        yield from pool.map(work, jobs)


def _pool(workers: int, device: torch.device) -> Executor:
    if device.type != "cpu" or workers <= _THREADS:
        return ThreadPoolExecutor(workers)
    # Not forked from here: threads of this process may hold locks.
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_alone)


def _alone() -> None:
    """A process of many: it has one core."""
    torch.set_num_threads(1)
