"""nerfstudio's commands as processes, with helpers and without, and what is left of them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from PIL import Image

from ns_multigpu.plugin.render.team import RENDER_RANKS
from tests.lib.processes import free_port, runs, until

ROOT = Path(__file__).parents[2]


def start(script: str, *words: object, **more: str) -> subprocess.Popen[str]:
    """Start one of nerfstudio's scripts, with more in its environment."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-W", "ignore", "-m", f"nerfstudio.scripts.{script}", *map(str, words)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def with_ffmpeg(folder: Path) -> dict[str, str]:
    """Return an environment in which ns-render finds ffmpeg, which it asks for also where it writes images."""
    folder.mkdir(exist_ok=True)
    (folder / "ffmpeg").symlink_to(imageio_ffmpeg.get_ffmpeg_exe())
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def done(process: subprocess.Popen[str], code: int = 0) -> str:
    """Return the output of a process after it has ended with this exit code."""
    said = process.communicate(timeout=180)[0]
    assert process.returncode == code, said
    return said


def children(pid: int) -> list[int]:
    """Return the processes that it has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def helpers_of(pid: int) -> list[int]:
    """Return the helpers of a process: forks of its fork server, without the tools that its imports run (ldconfig)."""
    servers = [child for child in children(pid) if _is_fork_server(child)]
    return [helper for server in servers for helper in children(server) if _is_fork_server(helper)]


def _is_fork_server(pid: int) -> bool:
    """Return whether a process is a fork server, or a fork of one, which has the same command line."""
    return b"multiprocessing.forkserver" in command(pid)


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Return whether all have ended after so many seconds."""
    return until(lambda: not any(map(runs, pids)), seconds)


def same_images(found: Path, expected: Path, count: int) -> None:
    """Assert that two folders hold so many pictures, equal to a 255th, none of them of one colour."""
    names = sorted(str(file.relative_to(expected)) for file in expected.rglob("*.png"))
    assert len(names) == count and names == sorted(str(file.relative_to(found)) for file in found.rglob("*.png"))
    for name in names:
        with Image.open(found / name) as ours, Image.open(expected / name) as theirs:
            difference = np.abs(np.asarray(ours, dtype=np.int32) - np.asarray(theirs, dtype=np.int32))
            assert np.asarray(theirs).std() > 5 and difference.max() <= 1, name


@contextlib.contextmanager
def viewer(run: Path, helpers: int, **more: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """ns-viewer, when its page is served, and its helpers."""
    port = free_port()
    process = start("viewer.run_viewer", "--load-config", run, "--viewer.websocket-port", port,
                     **{RENDER_RANKS: str(helpers + 1), **more})  # fmt: skip
    pids: list[int] = []
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        pids = helpers_of(process.pid)
        assert len(pids) == helpers, process.communicate(timeout=10)[0] if process.poll() is not None else pids
        yield process, pids
    finally:
        for pid in (process.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                if runs(pid):
                    os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def killed(run: Path, helpers: int, victim: str, **more: str) -> None:
    """Start ns-viewer, kill it ("parent") or its last helper, and assert that all of them end."""
    with viewer(run, helpers, **more) as (process, pids):
        if victim == "parent":
            process.kill()
            assert gone(pids, 4.0), "helpers have outlived their parent"  # by 5 s the closed connections end them
        else:
            os.kill(pids[-1], signal.SIGKILL)
            said = process.communicate(timeout=20)[0]
            assert process.returncode == 1 and f"Helper {helpers} of {helpers} was killed by SIGKILL" in said, said
            assert gone(pids)


def command(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
