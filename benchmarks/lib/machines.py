"""Machines to try things out on: network namespaces of this host, joined by a link of a given rate.

Each is to a program what a machine is: an address, a host name, an interface and a loopback of its own. They share the
host's processors, memory and disks, so that a folder is seen by all, as on a network file system. Needs Linux and root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "util-linux"}
_LATENCY = "50ms"
"""The longest that a packet waits for its turn before it is dropped, as in a switch."""


def why_none() -> str:
    """Return the reason why this process cannot create machines; "" if it can."""
    if sys.platform != "linux":
        return "machines are network namespaces, which only Linux has"
    if os.geteuid() != 0:
        return "machines are network namespaces, which only root can make: run it with sudo, or in a container as root"
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (apt install {package})"
    name = f"nsm{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return ""


class TwoMachines:
    """Two machines, named node0 and node1, while it is entered; afterwards nothing is left of them, processes included.

    Args:
        megabits: the link's rate each way, in 10^6 bits a second; None for as fast as the host can.

    Attributes:
        addresses: of the machines.

    Raises:
        RuntimeError: on entering: they cannot be made; it says why.
    """

    names = ("node0", "node1")
    interface = "eth0"
    """Name of the link on each machine."""

    def __init__(self, megabits: float | None = None) -> None:
        self.megabits = megabits
        subnet = os.getpid() % 250
        self.addresses = tuple(f"10.213.{subnet}.{1 + machine}" for machine in range(2))
        self._spaces = tuple(f"nsm{os.getpid()}-{machine}" for machine in range(2))
        self._hosts = Path()
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> "TwoMachines":
        if reason := why_none():
            raise RuntimeError(reason)
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _make(self) -> None:
        with tempfile.NamedTemporaryFile("w", prefix="hosts-", delete=False) as file:
            file.write("127.0.0.1 localhost\n")
            file.writelines(f"{address} {name}\n" for address, name in zip(self.addresses, self.names, strict=True))
        self._hosts = Path(file.name)
        self._hosts.chmod(0o644)
        for space in self._spaces:
            _do("ip", "netns", "add", space)
        one, other = self._spaces
        _do(
            *("ip", "link", "add", self.interface, "netns", one),
            *("type", "veth", "peer", "name", self.interface, "netns", other),
        )
        for space, address in zip(self._spaces, self.addresses, strict=True):
            _do("ip", "-n", space, "address", "add", f"{address}/24", "dev", self.interface)
            for device in ("lo", self.interface):
                _do("ip", "-n", space, "link", "set", device, "up")
            if self.megabits is not None:
                # The bucket holds the bytes of a millisecond, and at least a few of the veth's large packets.
                burst = max(int(self.megabits * 1e6 / 8 / 1000), 192 * 1024)
                _do(
                    *("tc", "-n", space, "qdisc", "add", "dev", self.interface, "root", "tbf"),
                    *("rate", f"{self.megabits:g}mbit", "burst", str(burst), "latency", _LATENCY),
                )

    def command(self, machine: int, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on a machine."""
        script = f'mount --bind {self._hosts} /etc/hosts && hostname {self.names[machine]} && exec "$@"'
        inside = ["unshare", "--mount", "--uts", "sh", "-c", script, "sh", *words]
        return ["ip", "netns", "exec", self._spaces[machine], *inside]

    def start(
        self,
        machine: int,
        words: Sequence[str],
        variables: Mapping[str, str] | None = None,
        log: IO[str] | None = None,
        folder: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program on a machine, with its output and errors in `log`."""
        process = subprocess.Popen(
            self.command(machine, words), env={**os.environ, **(variables or {})}, stdout=log,
            stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=folder,
        )  # fmt: skip
        self._started.append(process)
        return process

    def switch_off(self, machine: int) -> None:
        """Kill all processes of a machine at once. Its address and link remain."""
        end = time.monotonic() + 30
        while (pids := self.pids(machine)) and time.monotonic() < end:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
            for process in self._started:
                process.poll()

    def sent(self, machine: int) -> int:
        """Return the bytes that a machine has sent over its link so far, headers of packets included."""
        return self.counted(machine)[0]

    def counted(self, machine: int) -> tuple[int, int]:
        """Return the bytes that a machine has sent over its link so far, and the packets."""
        paths = [f"/sys/class/net/{self.interface}/statistics/tx_{what}" for what in ("bytes", "packets")]
        sent, packets = _do("ip", "netns", "exec", self._spaces[machine], "cat", *paths).split()
        return int(sent), int(packets)

    def close(self) -> None:
        """Stop all started processes and remove the machines."""
        for machine, space in enumerate(self._spaces):
            if Path("/var/run/netns", space).exists():
                self.switch_off(machine)
                subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        if self._hosts != Path():
            self._hosts.unlink(missing_ok=True)

    def pids(self, machine: int) -> list[int]:
        """Return the processes that run on a machine."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._spaces[machine]], capture_output=True, text=True, check=False
        )
        return [int(word) for word in listed.stdout.split()]


def _do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
