"""How a process that another launcher has started leaves its group."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin.test_launch import HANG, ROOT, environment, free_port

ENDING = """
import atexit, sys
import torch.distributed as dist
atexit.register(lambda: print("in a group" if dist.is_initialized() else "has left", flush=True))  # asked last
from ns_multigpu.core.world import World
from ns_multigpu.plugin.launch.process_world import set_world
set_world(World.from_env("cpu"))
assert dist.is_initialized()
if "fail" in sys.argv:
    raise ValueError("this rank alone")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_groups_end_before_python_does_unless_an_error_ends_it(tmp_path: Path, fails: bool) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [
        subprocess.Popen(
            [sys.executable, str(script), *(["fail"] if fails and rank == 1 else [])], cwd=ROOT, text=True,
            env=environment(**place, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=HANG)[0] for process in running]
    assert [process.returncode for process in running] == [0, int(fails)], said
    assert "has left" in said[0] and ("in a group" if fails else "has left") in said[1], said
