"""Views side by side: in threads, and in processes where many are asked for on a CPU."""

import os
import pickle
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.city import City, CityCapture, colmap_writer, dnerf_writer
from ns_multigpu.city.side_by_side import side_by_side


class _Tells:
    """Leaves a file for each job: its process, the threads of torch there, and which copy of the work it is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.copy = folder, "the first"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.folder, self.copy = state["folder"], uuid.uuid4().hex

    def __call__(self, job: int) -> int:
        (self.folder / str(job)).write_text(f"{os.getpid()},{torch.get_num_threads()},{self.copy}")
        return 10 * job

    def run_jobs(self, jobs: int) -> list[tuple[str, ...]]:
        """Of each job: process, threads, copy."""
        return [tuple((self.folder / str(job)).read_text().split(",")) for job in range(jobs)]


@pytest.mark.parametrize(("workers", "device"), [(2, "cpu"), (5, "cuda"), (30, "cpu")])
def test_few_workers_and_gpus_take_threads(tmp_path: Path, workers: int, device: str) -> None:
    work, jobs = _Tells(tmp_path), 1 if workers == 30 else 12  # one view needs no other process
    assert list(side_by_side(work, range(jobs), workers, device)) == [10 * job for job in range(jobs)]
    assert {(process, copy) for process, _, copy in work.run_jobs(jobs)} == {(str(os.getpid()), "the first")}


def test_many_views_on_a_cpu_are_rendered_by_processes(tmp_path: Path) -> None:
    work = _Tells(tmp_path)
    assert list(side_by_side(work, range(30), 5, "cpu")) == [10 * job for job in range(30)]
    processes, threads, copies = map(set, zip(*work.run_jobs(30), strict=True))
    assert str(os.getpid()) not in processes and threads == {"1"}
    assert "the first" not in copies and len(copies) == len(processes) <= 5, "work is sent to a process once"


def test_no_workers_and_no_work(tmp_path: Path) -> None:
    assert list(side_by_side(_Tells(tmp_path), [], 30, "cpu")) == []
    with pytest.raises(ValueError, match="workers: 0; give 1 or more"):
        list(side_by_side(_Tells(tmp_path), [1], 0, "cpu"))


def _fails(job: int) -> int:
    raise OSError(f"view {job}: the disk is full")


def test_failure_is_raised_by_the_caller() -> None:
    with pytest.raises(OSError, match="view 0: the disk is full"):
        list(side_by_side(_fails, list(range(6)), 2, "cpu"))


@pytest.mark.parametrize("layout", ["colmap", "dnerf"])
def test_writer_functions_are_picklable(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(work: Callable[[Any], int], jobs: Iterable[Any], *_: Any) -> list[int]:
        again = pickle.loads(pickle.dumps(work))
        return [again(job) for job in jobs]

    writer, write = (
        (colmap_writer, colmap_writer.write_colmap) if layout == "colmap" else (dnerf_writer, dnerf_writer.write_dnerf)
    )
    capture = CityCapture(City(blocks=1, seed=0), views=10, width=72, height=48, time_varying=True)
    write(capture, tmp_path / "here")
    monkeypatch.setattr(writer, "side_by_side", sent)
    write(capture, tmp_path / "there")
    here, there = (
        {file.relative_to(tmp_path / folder): file.read_bytes() for file in (tmp_path / folder).rglob("*.png")}
        for folder in ("here", "there")
    )
    assert here == there and len(here) == (10 if layout == "colmap" else 10 + len(capture.split("test")))
