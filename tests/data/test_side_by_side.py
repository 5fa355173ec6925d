"""Views side by side: in threads, and in processes where many are asked for on a CPU."""

import os
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from ns_multigpu.data.side_by_side import side_by_side


def _seen(folder: str, job: int) -> int:
    """Leaves a file that says who has done the job."""
    with open(f"{folder}/{job}", "w", encoding="utf8") as file:
        file.write(f"{os.getpid()} {threading.get_ident()} {torch.get_num_threads()}")
    return 10 * job


@pytest.mark.parametrize(("workers", "device", "here"), [(2, "cpu", True), (5, "cpu", False), (5, "cuda", True)])
def test_many_views_on_a_cpu_are_rendered_by_processes(tmp_path: Path, workers: int, device: str, here: bool) -> None:
    jobs = list(range(12))
    assert list(side_by_side(partial(_seen, str(tmp_path)), jobs, workers, device)) == [10 * job for job in jobs]
    told = [(tmp_path / str(job)).read_text().split() for job in jobs]
    assert {int(process) == os.getpid() for process, _, _ in told} == {here}
    if not here:
        assert {threads for _, _, threads in told} == {"1"}


def test_no_more_workers_than_jobs_and_no_fewer_than_one(tmp_path: Path) -> None:
    work = partial(_seen, str(tmp_path))
    assert list(side_by_side(work, [3], 30, "cpu")) == [30]
    assert (tmp_path / "3").read_text().split()[0] == str(os.getpid()), "one view needs no other process"
    assert list(side_by_side(work, [], 30, "cpu")) == []
    with pytest.raises(ValueError, match="workers: 0; give 1 or more"):
        list(side_by_side(work, [1], 0, "cpu"))


def _fails(job: int) -> int:
    raise OSError(f"view {job}: the disk is full")


@pytest.mark.parametrize("workers", [2, 5])
def test_what_fails_is_told(workers: int) -> None:
    with pytest.raises(OSError, match="view 0: the disk is full"):
        list(side_by_side(_fails, list(range(6)), workers, "cpu"))
