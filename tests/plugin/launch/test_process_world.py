"""Shutdown of the process group in a process that another launcher has started."""

import ctypes
import hashlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ns_multigpu.plugin.launch import process_world
from tests.plugin.launch.test_launch import HANG, run_as_ranks

ENDING = """
import atexit, os
import torch.distributed as dist
atexit.register(lambda: print("in a group" if dist.is_initialized() else "has left", flush=True))  # asked last
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.launch import process_world
process_world.set_world(World.from_env("cpu"))
wait = process_world.wait_for_gloo
process_world.wait_for_gloo = lambda: print("waits", dist.is_initialized(), wait(), flush=True)
assert dist.is_initialized()
if "FAILS" in os.environ:
    raise ValueError("this rank alone")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_groups_end_before_python_does_unless_an_error_ends_it(tmp_path: Path, fails: bool) -> None:
    places = [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1", **({"FAILS": "yes"} if fails else {})}]
    codes, said = run_as_ranks(ENDING, tmp_path, places)
    assert codes == [0, int(fails)], said
    assert "has left" in said[0] and ("in a group" if fails else "has left") in said[1], said
    assert "waits False True" in said[0] and f"waits {fails} True" in said[1], "for gloo's threads, whatever ends it"


def _compute(done: threading.Event) -> None:
    """Work without Python's lock, as gloo's. It takes the lock in between."""
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        hashlib.sha256(bytes(30_000_000))
    done.set()


def _pause(done: threading.Event) -> None:
    """A thread that is called again and again, for a moment: whenever one looks it sleeps."""
    for _ in range(1500):
        time.sleep(0.001)
    done.set()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows what a process's threads do")
@pytest.mark.parametrize("work", [_compute, _pause])
def test_threads_of_gloo_that_have_something_to_do_are_waited_for(work: Callable[[threading.Event], None]) -> None:
    """A thread by their name stands for them: theirs hold tensors for a moment only."""
    begun, done, over = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
        begun.set()
        work(done)
        over.wait()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        assert not process_world.wait_for_gloo(limit=0.05)
        assert not done.is_set()
        assert process_world.wait_for_gloo(limit=HANG)
        assert done.is_set()
    finally:
        over.set()
        thread.join()


def test_gloo_threads_are_not_awaited_if_not_listed(tmp_path: Path) -> None:
    assert process_world.wait_for_gloo(limit=HANG, tasks=tmp_path / "none")
