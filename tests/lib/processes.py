"""Ports and processes of this machine, and waiting for what they do."""

import contextlib
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path


def free_port() -> int:
    """Return a port on which nothing listens, below those that the system hands out: a connection of another test may
    take one of these before it is used."""
    with socket.socket() as probe:
        while True:
            port = random.SystemRandom().randrange(10_000, 32_000)  # workers of pytest may share a seed
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


def runs(pid: int) -> bool:
    """Return whether a process runs. A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(true: Callable[[], object], seconds: float = 60.0) -> bool:
    """Wait for a condition, and return whether it was met within so many seconds."""
    end = time.monotonic() + seconds
    while not (met := true()) and time.monotonic() < end:
        time.sleep(0.005)
    return bool(met)
