"""Atomic saving of checkpoints by all ranks together, and opening them.

See `checkpoint.verify` for the files. A save creates a folder `unfinished-...` in the states folder. It writes and
syncs all files into it, the training state concurrently with the model, and the manifest last. It then renames the
folder and moves the .ckpt to its place. A process that dies in between leaves at most an unnamed folder, which the next
save removes.
"""

import gc
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_objects, broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.held_rows import Rows
from ns_multigpu.plugin.checkpoint.storage import save_file, sync_folder, write_file
from ns_multigpu.plugin.checkpoint.verify import (
    FORMAT,
    MANIFEST,
    OURS,
    SHARDS,
    DamagedCheckpoint,
    Manifest,
    Stamp,
    checkpoints_in,
    dump_manifest,
    latest_checkpoint,
    problems,
    read_checkpoint_file,
    read_manifest,
    state_of,
    states_folder,
    step_of,
)
from ns_multigpu.plugin.faults.errors import InputError

if TYPE_CHECKING:
    from ns_multigpu.plugin.checkpoint.saved_tensors import SavedTensors

T = TypeVar("T")
_UNFINISHED = "unfinished-"


def save(
    models: Path,
    step: int,
    pipeline: Callable[[], Mapping[str, Any]],
    tensors: Mapping[str, Tensor | Rows],
    values: Mapping[str, Any],
    world: World,
    *,
    at_once: bool = True,
) -> str:
    """Write a checkpoint. Every rank calls it, and gets the same result.

    Args:
        models: the run's `nerfstudio_models` folder, on a file system that all ranks share.
        step: the last step taken.
        pipeline: returns the state that nerfstudio's commands read; called on rank 0. The name of the state folder is
            added to its marker of shards (see sharded_state).
        tensors, values: the training state (see training_state); values are rank 0's.
        at_once: write with several threads. False during training, which needs the host's cores.

    Returns:
        "" on success; otherwise the disk's error, and all files are unchanged.
    """
    from ns_multigpu.plugin.checkpoint.saved_tensors import save_tensors

    name = broadcast_object(f"step-{step:09d}-{secrets.token_hex(4)}", 0, world)
    states = states_folder(models)
    folder = states / (_UNFINISHED + name)
    file = folder / f"step-{step:09d}.ckpt"

    def begin() -> None:
        if world.is_main:
            models.mkdir(parents=True, exist_ok=True)
            states.mkdir(parents=True, exist_ok=True)
            for left in states.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
            folder.mkdir()

    def write() -> tuple[dict[str, Stamp], Stamp | None]:
        if at_once and world.device.type == "cuda":
            torch.cuda.synchronize(world.device)  # wait for copies of other threads on their own streams
        if not at_once or not world.is_main:
            stamps = save_tensors(folder, tensors, world, at_once=at_once)
            return stamps, write_model() if world.is_main else None
        with ThreadPoolExecutor(1, "model") as executor:
            stamp = executor.submit(write_model)
            return save_tensors(folder, tensors, world), stamp.result()

    def write_model() -> Stamp:
        if world.device.type == "cuda":  # set this thread's device, which starts as GPU 0
            torch.cuda.set_device(world.device)
        content = dict(pipeline())
        if SHARDS in content:
            content[SHARDS] = {**content[SHARDS], "state": name}
        ours = {"format": FORMAT, "state": name, "method": values.get("method"), "images": values.get("images")}
        return save_file(file, {"step": step, "pipeline": content, OURS: ours})

    def commit() -> None:
        if world.is_main:
            assert stamp is not None
            for written, expected in [*files.items(), (file.name, stamp)]:
                if not (folder / written).is_file() or (folder / written).stat().st_size != expected.size:
                    raise OSError(
                        f"{folder / written} does not appear on the machine of rank 0 as it was written: the output "
                        "folder must be on a file system that all machines share"
                    )
            write_file(folder / MANIFEST, dump_manifest(Manifest(dict(values), stamp, files)))
            sync_folder(folder)
            folder.rename(states / name)
            sync_folder(states)
            _date_last(states / name / file.name, models)
            os.replace(states / name / file.name, models / file.name)
            sync_folder(models)

    _, problem = together(begin, world, OSError)
    stamp, files = None, dict[str, Stamp]()
    if not problem:
        written, problem = together(write, world, OSError)
        if written is not None:
            stamp = written[1]
            for part in all_gather_objects(written[0], world):
                files.update(part)
            _, problem = together(commit, world, OSError)
    if problem and world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        if not (models / file.name).exists():
            shutil.rmtree(states / name, ignore_errors=True)
    return problem


def _date_last(file: Path, models: Path) -> None:
    """Set a checkpoint's modification time after that of all others, since `remove_old` sorts by it.

    Others may have been written by a machine with a different clock.
    """
    others = [path.stat().st_mtime_ns for path in checkpoints_in(models)]
    status = file.stat()
    if others and status.st_mtime_ns <= max(others):
        os.utime(file, ns=(status.st_atime_ns, max(others) + 10**6))


def remove_old(models: Path, keep: int, world: World, step: int) -> None:
    """Remove all but the newest `keep` checkpoints (0 keeps all), and state folders that no checkpoint names.

    Checkpoints of later steps than `step`, which was just written, are removed, too: the run went on from an earlier
    one, or with more images a step. nerfstudio's commands would take the largest step for the newest model.
    """
    if not world.is_main:
        return
    with suppress(OSError):  # the next save tries again
        found = sorted(checkpoints_in(models), key=lambda path: (path.stat().st_mtime_ns, step_of(path)))
        for path in found if keep else []:
            if path in found[: len(found) - keep] or step_of(path) > step:
                path.unlink()
        named: set[Path | None] = set()
        for path in checkpoints_in(models):
            try:
                named.add(state_of(path, read_checkpoint_file(path)))
            except InputError:  # damaged: keep all files of its step for inspection
                named.update(states_folder(models).glob(f"{path.stem}-*"))
        for folder in states_folder(models).glob("step-*"):
            if folder not in named:
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Opened:
    """Checkpoint whose files are verified.

    Attributes:
        path: the .ckpt.
        content: of the .ckpt.
        values: plain values of the training state; empty for a plain nerfstudio checkpoint.
        tensors: tensors of the training state; None for a plain nerfstudio checkpoint, with optimizers in `content`.
    """

    path: Path
    content: dict[str, Any]
    values: dict[str, Any]
    tensors: "SavedTensors | None"


def open_checkpoint(path: Path, world: World) -> Opened:
    """Verify a checkpoint, with the files distributed over the ranks, and open it. Every rank calls it.

    Raises:
        InputError: on every rank: the file is damaged (a `DamagedCheckpoint` on the rank that found it), no checkpoint,
            or written by a newer version.
    """

    from ns_multigpu.plugin.checkpoint.saved_tensors import SavedTensors

    def look() -> Opened:
        content = read_checkpoint_file(path)
        folder = state_of(path, content)
        if folder is None:
            return Opened(path, content, {}, None)
        manifest = read_manifest(folder)
        if found := problems(path, folder, manifest, world.rank, world.size):
            raise DamagedCheckpoint("; ".join(found))
        try:
            return Opened(path, content, manifest.values, SavedTensors(folder))
        except Exception as error:
            raise DamagedCheckpoint(f"{folder / '.metadata'} has been altered: {error}") from error

    opened, problem = together(look, world, InputError)
    if problem:
        whole = broadcast_object(latest_checkpoint(path.parent) if world.is_main else None, 0, world)
        advice = f" The newest whole one there is step {step_of(whole)}: --load-step {step_of(whole)}." if whole else ""
        raise InputError(problem.rstrip(".") + "." + advice)
    assert opened is not None
    return opened


def chosen(
    load_dir: Path | None,
    load_step: int | None,
    load_checkpoint: Path | None,
    own: Path,
    restarts: int,
    report: Callable[[str], None],
) -> Path | None:
    """Return the checkpoint to resume from.

    A restarted job resumes from its own newest complete checkpoint. Otherwise nerfstudio's flags decide.

    Args:
        load_dir, load_step, load_checkpoint: nerfstudio's flags.
        own: this run's `nerfstudio_models`.
        restarts: number of restarts of this job by the launcher.
        report: called with lines for the user.

    Raises:
        InputError: a flag names no checkpoint.
    """
    if restarts > 0 and (path := latest_checkpoint(own, report)) is not None:
        return path
    if load_dir is not None:
        if not load_dir.is_dir():
            raise InputError(f"--load-dir {load_dir}: there is no such folder. Give a run's nerfstudio_models folder.")
        steps = [step_of(path) for path in checkpoints_in(load_dir)]
        if not steps:
            raise InputError(f"--load-dir {load_dir}: there is no step-*.ckpt in it.")
        if load_step is not None and load_step not in steps:
            listed = ", ".join(map(str, steps))
            raise InputError(f"--load-step {load_step}: {load_dir} has no such step; there are {listed}.")
        return load_dir / f"step-{steps[-1] if load_step is None else load_step:09d}.ckpt"
    if load_checkpoint is not None and not load_checkpoint.is_file():
        raise InputError(f"--load-checkpoint {load_checkpoint}: there is no such file.")
    return load_checkpoint


def to_go_on_from(config: Any, own: Path, restarts: int, world: World, report: Callable[[str], None]) -> Path | None:
    """Return the checkpoint that all ranks resume from, chosen by rank 0; None for a new run. Every rank calls it.

    Args:
        config: with nerfstudio's flags `load_dir`, `load_step` and `load_checkpoint`.
        own, restarts, report: see `chosen`.

    Raises:
        InputError: on every rank, if a flag names no checkpoint.
    """

    def choose() -> Path | None:
        flags = (config.load_dir, config.load_step, config.load_checkpoint)
        return chosen(*flags, own, restarts, report) if world.is_main else None

    path, problem = together(choose, world, InputError)
    if problem:
        raise InputError(problem)
    path = broadcast_object(path, 0, world)
    if path is None and restarts > 0:
        report("The launcher has restarted this job, which has no whole checkpoint yet: it starts from image 0.")
    return path


def together(work: Callable[[], T], world: World, expected: type[Exception]) -> tuple[T | None, str]:
    """Run `work` on every rank and share failures, so that all ranks succeed or none does.

    Args:
        expected: type of an error that is no bug.

    Returns:
        the result, and ""; or None, and the message of the first rank with an `expected` error.

    Raises:
        Exception: any other error of this rank.
        RuntimeError: any other error of another rank.
    """
    result, problem, bug = None, "", None
    try:
        result = work()
    except expected as error:
        problem = str(error)
    except Exception as error:
        bug = error
    except BaseException as error:
        from torch.distributed.checkpoint.api import CheckpointException

        # torch has sent every rank the errors of all.
        failures = error.failures if isinstance(error, CheckpointException) else {}
        if not failures or not all(isinstance(cause, expected) for cause, _ in failures.values()):
            raise
        problem = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in failures.items())
    if problem:
        # The frames of a failed save refer to each other and to the process groups. Free them now: gloo's threads abort
        # the interpreter if they exist at its end.
        gc.collect()
    said = all_gather_objects((problem, repr(bug) if bug else ""), world)
    if bug is not None:
        raise bug
    for rank, (_, text) in enumerate(said):
        if text:
            raise RuntimeError(f"rank {rank} failed: {text}")
    problem = next((text for text, _ in said if text), "")
    return (None if problem else result), problem
