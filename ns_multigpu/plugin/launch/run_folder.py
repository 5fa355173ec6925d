"""A run's folder: where it is, its name, kept for when the job's launcher restarts it, and its end where nothing came.

torchrun starts the same command again after a failure, and each start would name a folder after its own time. So the
first start notes the name under the identity of the job, and a restart looks it up there. The note lies beside the run
folders: rank 0 may come back on another machine, which shares nothing with the first but the output folder.
"""

import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

from ns_multigpu.plugin.faults.errors import InputError

_EVAL_SETUP = ("nerfstudio", "utils", "eval_utils.py")
_NOT_TRAINED = ("config.yml", "dataparser_transforms.json", "viewer_log_filename.txt", "events.out.tfevents*")
"""What a run writes before its first step."""


class Run(Protocol):
    """A run that may have a folder of its own already."""

    def abandon(self) -> None: ...


def restarts() -> int:
    """How often the launcher has restarted this job; 0 in its first life, and without a launcher that restarts."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job_identity() -> str:
    """What is the same in all lives of a job, and in no other job: torchrun's --rdzv-id, or its process."""
    identity = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if identity == "none":  # what torchrun says when no id was given
        identity = f"{socket.gethostname()} {os.getppid()}"
    return identity


def note_name(folder: Path, name: str) -> None:
    """Keeps the name of this job's run folder, which lies in `folder`.

    Raises:
        OSError: it cannot be written.
    """
    path = _note(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps({"job": job_identity(), "name": name}), encoding="utf8")
    part.replace(path)


def noted_name(folder: Path) -> str | None:
    """The name that this job's first life gave to its run folder in `folder`; None if nothing is known of it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(_note(folder).read_text(encoding="utf8"))
        if note["job"] == job_identity():
            return str(note["name"])
    return None


def _note(folder: Path) -> Path:
    digest = hashlib.blake2b(job_identity().encode(), digest_size=8).hexdigest()
    return folder / ".jobs" / f"{digest}.json"


def config_being_loaded() -> Path | None:
    """The config.yml that ns-eval, ns-render, ns-viewer or ns-export is reading a run's configuration from.

    They ask the configuration where its checkpoints are, and not where it was found: that stands further up the stack.
    """
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_name == "eval_setup" and Path(frame.f_code.co_filename).parts[-3:] == _EVAL_SETUP:
            return Path(frame.f_locals["config_path"])
        frame = frame.f_back
    return None


def remove_unused(folder: Path, top: Path) -> None:
    """Removes a run's folder in which nothing has been trained, and the folders above it that it alone was in.

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
def abandoned_unless_begun(run: Run) -> Iterator[None]:
    """Encloses what comes before a run's first step: where it is refused, or stopped, no empty folder stays."""
    try:
        yield
    except (InputError, SystemExit, KeyboardInterrupt):
        run.abandon()
        raise
