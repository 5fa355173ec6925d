"""Provenance of a figure: time, machine, commit and command."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """Return date, commit, command, cpu, cores, load, gpus and versions of Python and torch, for a benchmark's JSON."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": f"python {shlex.join([*_program(), *sys.argv[1:]])}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """Return the commit of this source tree, with "+" if it has changes. A copy without git reads
    NS_MULTIGPU_COMMIT."""
    if named := os.environ.get("NS_MULTIGPU_COMMIT"):
        return named
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _program() -> list[str]:
    main = sys.modules["__main__"].__spec__
    return ["-m", main.name] if main is not None else sys.argv[:1]
