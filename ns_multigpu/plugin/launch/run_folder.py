"""Run folder: its path, its name across restarts by the job's launcher, and its removal if nothing was trained.

torchrun starts the same command again after a failure, and each start would name a folder after its own time. So the
first start stores the name under each process of torchrun that takes part (its agents, one per machine), and a restart
looks it up. The note lies next to the run folders: rank 0 may restart on another machine, which shares only the output
folder with the first. An agent that joined later has no record of earlier attempts. Only an agent of the first attempt
distinguishes a restart from another job.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

from ns_multigpu.plugin.faults.errors import InputError, whole_file
from ns_multigpu.plugin.launch.ranks import Start

_EVAL_SETUP = ("nerfstudio", "utils", "eval_utils.py")
_NOT_TRAINED = ("config.yml", "dataparser_transforms.json", "viewer_log_filename.txt", "events.out.tfevents*")
"""Files that a run writes before its first step."""


class FolderedRun(Protocol):
    """Run that may already have a folder of its own."""

    def abandon(self) -> None: ...


_restarts = 0
"""Number of restarts known to the other ranks."""


def restarts() -> int:
    """Return this job's number of restarts as known to this process; rank 0 knows the job's (`recall`).

    It is 0 in the first attempt, and without a launcher that restarts.
    """
    return max(_restarts, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def recall(folder: Path, starts: Sequence[Start]) -> str | None:
    """Find out from all ranks whether this job has lived before: each machine's agent counts the restarts that it made.

    Args:
        folder: where run folders lie.
        starts: what the ranks say.

    Returns:
        the name that an earlier life gave to its run folder in `folder`; None if nothing is known of one.
    """
    global _restarts
    name = _noted_name(folder, starts) if "TORCHELASTIC_RUN_ID" in os.environ else None
    _restarts = max([int(name is not None), *(start.restarts for start in starts)])
    return name


def note_name(folder: Path, name: str, starts: Sequence[Start]) -> None:
    """Store the name of this job's run folder in `folder`, for restarts of the job.

    Args:
        starts: what the ranks say.

    Raises:
        InputError: it cannot be written.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    for agent in sorted({start.agent for start in starts}):
        with whole_file(_note(folder, agent)) as part:
            part.write_text(json.dumps({"job": _job(), "agent": agent, "name": name}), encoding="utf8")


def _noted_name(folder: Path, starts: Sequence[Start]) -> str | None:
    for agent in sorted({start.agent for start in starts}):
        with suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(_note(folder, agent).read_text(encoding="utf8"))
            if (note["job"], note["agent"]) == (_job(), agent):
                return str(note["name"])
    return None


def _job() -> str:
    """Return torchrun's --rdzv-id; "none" without one."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


def _note(folder: Path, agent: str) -> Path:
    digest = hashlib.blake2b(f"{_job()} {agent}".encode(), digest_size=8).hexdigest()
    return folder / ".jobs" / f"{digest}.json"


def config_being_loaded() -> Path | None:
    """Return the config.yml from which ns-eval, ns-render, ns-viewer or ns-export is reading a configuration.

    They ask the configuration where its checkpoints are, and not where it was found: that stands further up the stack.
    """
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_name == "eval_setup" and Path(frame.f_code.co_filename).parts[-3:] == _EVAL_SETUP:
            return Path(frame.f_locals["config_path"])
        frame = frame.f_back
    return None


def remove_unused(folder: Path, top: Path) -> None:
    """Remove a run's folder in which nothing has been trained, and parent folders that become empty.

    Args:
        top: the output folder, which stays.
    """
    with suppress(OSError):
        if any(not any(path.match(name) for name in _NOT_TRAINED) for path in folder.iterdir() if path.is_file()):
            return
        shutil.rmtree(folder)
        for parent in folder.parents:
            if parent == top:
                return
            parent.rmdir()  # fails, and so ends this, where it is not empty


@contextmanager
def abandoned_unless_begun(run: FolderedRun) -> Iterator[None]:
    """Enclose the start of a run: if it is refused or stopped, remove its empty folder."""
    try:
        yield
    except (InputError, SystemExit, KeyboardInterrupt):
        run.abandon()
        raise
