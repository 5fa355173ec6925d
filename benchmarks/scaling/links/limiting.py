"""A slow link between processes of one host, without root: their TCP traffic is limited to a rate.

A small library (`limited_link.c`, compiled on first use by cc, gcc or clang) is preloaded into the processes and stands
before send, recv, read, write and their kin. What it models: each process is a machine with one network interface. All
its TCP connections and threads share the rate, each direction for itself. A link that something waits for is always
busy, so that long messages take their bytes over the rate. All TCP counts: also gloo's messages, and the few kilobytes
of the rendezvous.

What it does not model:
- Latency: bytes are received without delay of the loopback, and the first 64 KB of a message ignore the rate.
- Packets: there are no headers, losses, or windows of congestion. 25 Gbit/s here are 25 Gbit/s of payload.
- Network cards: processors copy all bytes, as with any TCP, but here one host does it for both ends.
- sendfile, splice, io_uring, UDP and RDMA are not limited. NCCL and gloo use none of them as `variables` sets them.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("limited_link.c")
_COMPILERS = ("cc", "gcc", "clang")
_NAP_US = 50
"""For which gloo's loop, which does not stop asking, leaves the processor to others."""


def why_none() -> str:
    """Return the reason why links cannot be limited here; "" if they can."""
    if sys.platform != "linux":
        return "links are limited by preloading a library, as Linux does it"
    return "" if _compiler() else f"there is no C compiler: none of {', '.join(_COMPILERS)}"


def library() -> Path:
    """Return the path of the compiled library, in the folder for temporary files.

    Raises:
        RuntimeError: it cannot be compiled; says what the compiler said.
    """
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError(why_none())
    name = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"limited-link-{os.getuid()}-{name}.so"
    if not made.exists():
        unfinished = made.with_suffix(f".{os.getpid()}")
        words = [compiler, "-O2", "-shared", "-fPIC", "-o", str(unfinished), str(_SOURCE)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"`{' '.join(words)}` failed:\n{done.stderr}")
        unfinished.replace(made)
    return made


def variables(gbit: float | None = None, *, cuda: bool) -> dict[str, str]:
    """Return the environment of processes whose links are limited. NCCL and gloo use these links in it: no memory is
    shared by processes, and no peer access.

    Args:
        gbit: the rate at first, 10^9 bits a second each way; None for no limit (see `limit`).
        cuda: whether they compute on GPUs. NCCL asks sockets without pause; gloo's loop does so too, but must not here.

    Raises:
        RuntimeError: see `library`.
    """
    found = {
        "LD_PRELOAD": " ".join(filter(None, (str(library()), os.environ.get("LD_PRELOAD", "")))),
        "LIMITED_LINK_GBIT": str(gbit or 0.0), "LIMITED_LINK_NAP_US": "0" if cuda else str(_NAP_US),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    if cuda:
        found |= {
            "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2",
        }  # fmt: skip
    return found


@dataclass(frozen=True)
class Passed:
    """Traffic of this process's link since its start: bytes in each direction, and seconds with data queued."""

    sent: int
    received: int
    sending_waited: float
    receiving_waited: float


def is_limited() -> bool:
    """Return True if the library intercepts this process's sockets."""
    return hasattr(ctypes.CDLL(None), "limited_link_rate")


def limit(gbit: float | None) -> None:
    """Set this process's rate, 10^9 bits a second each way; None for no limit.

    Raises:
        RuntimeError: the library was not preloaded.
    """
    _loaded().limited_link_rate(ctypes.c_double(gbit or 0.0))


def passed() -> Passed:
    """Return the link's traffic.

    Raises:
        RuntimeError: the library was not preloaded.
    """
    counts = (ctypes.c_int64 * 4)()
    _loaded().limited_link_counts(counts)
    sent, sending, received, receiving = counts
    return Passed(sent, received, sending / 1e9, receiving / 1e9)


def _loaded() -> ctypes.CDLL:
    if not is_limited():
        raise RuntimeError("this process's link is not limited: start it with the variables of limiting.variables()")
    return ctypes.CDLL(None)


def _compiler() -> str | None:
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)
