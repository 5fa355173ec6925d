"""The name of a run's folder, kept for when its launcher restarts the job.

torchrun starts the same command again after a failure, and each start would name a folder after its own time. So the
first start notes the name under the identity of the job, and a restart looks it up there. The note lies beside the run
folders: rank 0 may come back on another machine, which shares nothing with the first but the output folder.
"""

import hashlib
import json
import os
import socket
from contextlib import suppress
from pathlib import Path


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
