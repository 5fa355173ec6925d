"""Helper processes of one that nerfstudio knows as the only one: ns-viewer, ns-eval and ns-render on several devices.

The process that the user started is rank 0. It starts the others, serves the store where all meet, and ends them with
itself. Whatever ends it, they end: the kernel kills them (on Linux), and each reads a pipe whose other end only rank 0
holds. If one of them dies, rank 0 says so and ends, for it might wait for the dead one for ever.
"""

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text

from ns_multigpu.core.world import World
from ns_multigpu.plugin.faults.signals import signal_name

PATIENCE = timedelta(days=30)
"""Rank 0 may think for so long between two things that it asks for. A helper that dies is noticed at once."""
_MODULE = "ns_multigpu.plugin.tools.helper"
_LEAVE = 3.0
"""Seconds that helpers have to end by themselves."""


class Helpers:
    """The helpers of this process, and the world of all of them.

    Args:
        count: how many. device_type: what each computes on; helper k on the k-th GPU that is visible.

    Attributes:
        world: of this process, rank 0, and its helpers.
        pids: the helpers' processes.
    """

    def __init__(self, count: int, device_type: Literal["cpu", "cuda"]) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store, self._ending = store, False
        threads = str(max(1, (os.cpu_count() or 1) // (count + 1)))
        shared = {
            "WORLD_SIZE": str(count + 1),
            "LOCAL_WORLD_SIZE": str(count + 1),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served already
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        threads = os.environ.get("OMP_NUM_THREADS", threads)
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", _MODULE, device_type, str(os.getpid())],
                env={**os.environ, **shared, **_place(rank), "OMP_NUM_THREADS": threads},
                stdin=subprocess.PIPE,  # nobody writes: it ends when this process does
                stdout=subprocess.DEVNULL,
            )
            for rank in range(1, count + 1)
        ]
        self.pids = [process.pid for process in self._processes]
        atexit.register(self.end)
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"helper {rank}", daemon=True).start()
        with _environment({**shared, **_place(0)}):
            self.world = World.from_env(device_type, control_timeout=PATIENCE)

    def end(self) -> None:
        """Ends the helpers; does nothing the second time."""
        if self._ending:
            return
        self._ending = True
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        until = time.monotonic() + _LEAVE
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if self._ending:
            return
        self._ending = True
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        hint = " The machine may have run out of memory (`dmesg` says so)." if code == -9 else ""
        text = f"Helper {rank} of {len(self._processes)} {how}; this process ends, too.{hint}"
        CONSOLE.quiet = False
        CONSOLE.print(Text(text, "bold red"), soft_wrap=True)
        for other in self._processes:
            with contextlib.suppress(OSError):
                other.kill()
        sys.stdout.flush()
        os._exit(1)  # other threads may wait for the dead one, where no exception reaches them


def _place(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Within, these variables are set; after it nobody takes this process for one that a launcher has started."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
