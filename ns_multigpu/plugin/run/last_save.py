"""Final checkpoint of a run, with a fallback folder and retries: until it is written, the model exists only in
memory."""

import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text

from ns_multigpu.core.dist.collectives import broadcast_int, broadcast_object
from ns_multigpu.plugin.checkpoint.verify import checkpoints_in
from ns_multigpu.plugin.faults.errors import SaveFailed
from ns_multigpu.plugin.launch.commands import resume_command
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.run.checkpoints import RunCheckpoints

if TYPE_CHECKING:
    from ns_multigpu.plugin.run.trainer import DistributedTrainer

_PAUSE = 3.0
"""Seconds between two attempts."""
_COPIED = ("config.yml", "dataparser_transforms.json", "metrics.jsonl")


def save_last(
    trainer: "DistributedTrainer",
    step: int,
    *,
    seconds: float,
    is_cancelled: Callable[[], bool],
    while_busy: Callable[[], None] | None = None,
) -> Path:
    """Write the checkpoint after `step` into the run's folder, else into `--save-fallback-dir`; retry if both fail.

    Retries give the user time to free disk space. Every rank calls it.

    Args:
        trainer: a `DistributedTrainer`.
        seconds: duration of retries.
        is_cancelled: returns whether to stop retrying; all ranks call it together and get the same answer.
        while_busy: called while threads write, or after the save if checkpoints are not written in the background. It
            must not change what is saved.

    Returns:
        the run folder that holds the checkpoint.

    Raises:
        SaveFailed: on every rank: no folder accepted it. The message says what is lost, and where space is free.
    """
    checkpoints: RunCheckpoints = trainer.checkpoints
    if while_busy is None or not trainer.config.save_in_background:
        folder = _saved(trainer, step, seconds, is_cancelled)
        if while_busy is not None:
            while_busy()
        return folder
    checkpoints.begin(step)
    try:
        while_busy()
    except BaseException:
        checkpoints.writer.finish()  # the threads of all ranks are there to finish it
        raise
    return _saved(trainer, step, seconds, is_cancelled)


def fallback_folder(folder: Path, place: Path) -> Path:
    """Return the folder in `place` for the run whose own folder is `folder`, with the same names of capture, method and
    time."""
    return place.joinpath(*folder.parts[-3:])


def _saved(trainer: "DistributedTrainer", step: int, seconds: float, is_cancelled: Callable[[], bool]) -> Path:
    """Save as `save_last` does: wait for a save that has begun, and retry."""
    checkpoints: RunCheckpoints = trainer.checkpoints
    config, world, folder = trainer.config, trainer.world, trainer.base_dir
    fallback = None if config.save_fallback_dir is None else fallback_folder(folder, config.save_fallback_dir)
    end, reported = time.monotonic() + seconds, False
    while True:
        trainer.guards.heart.beat("checkpoint")
        problem = in_short(checkpoints.write(step))
        if not problem:
            run_parts().done("last save")
            return folder
        if fallback is not None:
            other = in_short(checkpoints.write(step, fallback / config.relative_model_dir))
            if not other:
                if world.is_main:
                    _complete(folder, fallback)
                _say(f"{trainer.checkpoint_dir} did not take the last checkpoint ({problem}): it is in {fallback}.")
                return fallback
            problem = f"{problem}; {fallback}: {other}"
        if is_cancelled() or broadcast_int(int(time.monotonic() >= end), world):
            break
        if not reported:
            reported = True
            _say(
                f"The last checkpoint could not be written to {trainer.checkpoint_dir}: {problem}. It is tried again "
                f"for {seconds:g} s: free some space there in the meantime. Ctrl-C cancels."
            )
        time.sleep(_PAUSE)
    raise SaveFailed(broadcast_object(_lost(trainer, step, problem) if world.is_main else "", 0, world))


def _complete(folder: Path, fallback: Path) -> None:
    """Copy the files of a run folder next to a checkpoint in another folder."""
    for name in _COPIED:
        with suppress(OSError):
            shutil.copy(folder / name, fallback / name)


def _lost(trainer: "DistributedTrainer", step: int, problem: str) -> str:
    models = trainer.checkpoint_dir
    lost, needed = trainer.objective.lost(step + 1)
    kept = checkpoints_in(models)
    places = ", ".join(f"{path} ({free / 1e9:,.1f} GB free)" for path, free in _places(needed))
    lines = [
        f"The checkpoint that this run was to end with could not be written to {models}: {problem}.",
        f"Lost: {lost}.",
        f"The newest checkpoint there is: {kept[-1]}." if kept else "There is no earlier checkpoint.",
    ]
    if places:
        lines.append(f"There is enough space in {places}.")
    again = "go on from the newest checkpoint:" if kept else "start again."
    lines.append(f"Free some space, or name a folder on another disk with --save-fallback-dir DIR, and {again}")
    if kept:
        lines.append(f"\n  {resume_command(str(trainer.config.method_name), trainer.base_dir, models)}")
    return "\n".join(lines)


def warn_of_disk(models: Path, points: int, needed: int, most: int) -> None:
    """Print a warning if the disk of the folder `models` lacks space for a run's checkpoints.

    Args:
        points: Gaussians that the run may end with. needed: bytes of a checkpoint of them.
        most: checkpoints that are there at a time, the one that is being written included.
    """
    place = next(path for path in (models, *models.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < max(most - len(checkpoints_in(models)), 1) * needed:
        _say(
            f"Up to {most} checkpoint(s) of {points:,} Gaussians, {_size(needed)} each, are on the disk at a time: "
            f"{place} has {_size(free)} free. Free some space, keep fewer (--keep-checkpoints), or name a folder on "
            "another disk with --save-fallback-dir DIR."
        )


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def in_short(problem: str) -> str:
    """Return the disk errors of all ranks, once each, without the names of unfinished files."""
    said = re.findall(r"\[Errno \d+\] ([^:;]+)", problem)
    return "; ".join(dict.fromkeys(said)) or problem


def _places(needed: int) -> list[tuple[Path, int]]:
    """Return folders of this machine with free space for `needed` bytes, and their free bytes."""
    found: dict[int, tuple[Path, int]] = {}
    for path in (Path.home(), Path.cwd(), Path(tempfile.gettempdir())):
        with suppress(OSError):
            free = shutil.disk_usage(path).free
            if free > 1.1 * needed + 2**20:
                found.setdefault(path.stat().st_dev, (path, free))
    return list(found.values())


def _say(line: str) -> None:
    CONSOLE.print(Text(line, "bold yellow"), soft_wrap=True)
