"""Small checkpoints, nerfstudio's way of finding them, and disks that misbehave."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import saved_tensors
from ns_multigpu.plugin.checkpoint import storage as checkpoint_storage
from ns_multigpu.plugin.checkpoint.atomic_save import save
from ns_multigpu.plugin.checkpoint.verify import check_checkpoint, checkpoints_in, states_folder, step_of

ALONE = World.single()


def tensors_of(step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """Shared ones of several types and sizes, and one of this rank's."""
    g = torch.Generator().manual_seed(step)
    shared = {f"shared/{i}": torch.rand(40 * i, 3, generator=g) for i in range(6)}
    more = {"count": torch.tensor(float(step)), "bytes": torch.arange(100, dtype=torch.uint8)}
    return {**shared, **more, f"rank{rank}/own": torch.full((7,), float(rank))}


def write(models: Path, step: int, world: World = ALONE) -> str:
    model = {"_model.gauss_params.means": torch.full((20, 3), float(step))}
    return save(models, step, lambda: model, tensors_of(step, world.rank), {"images": step}, world)


def as_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on these small checkpoints are written as large ones are: in several files."""
    monkeypatch.setattr(saved_tensors, "_PART", 1000)
    monkeypatch.setattr(saved_tensors, "cores", lambda: 64)


def copied(models: Path, place: Path) -> Path:
    shutil.copytree(models.parent, place)
    return place / models.name


def newest_as_nerfstudio_finds_it(models: Path) -> int:
    """By its rule, which takes every name in the folder for a checkpoint's; and as it opens it."""
    steps = [int(x[x.find("-") + 1 : x.find(".")]) for x in os.listdir(models)]
    content = torch.load(models / f"step-{max(steps):09d}.ckpt", map_location="cpu")
    assert content["step"] == max(steps)
    assert torch.equal(content["pipeline"]["_model.gauss_params.means"], torch.full((20, 3), float(max(steps))))
    return max(steps)


def files_of(models: Path, step: int) -> list[Path]:
    (folder,) = states_folder(models).glob(f"step-{step:09d}-*")
    return [models / f"step-{step:09d}.ckpt", *sorted(folder.iterdir())]


def steps_in(models: Path) -> list[int]:
    """Return the checkpoints in a folder, each of which must be whole."""
    found = checkpoints_in(models)
    for path in found:
        assert check_checkpoint(path) is not None
    return [step_of(path) for path in found]


def no_space(name: object) -> NoReturn:
    """Fail as a full disk does that is to take a file's bytes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(name))


@contextmanager
def disk(behave: Callable[[str], None]) -> Iterator[None]:
    """Call `behave` with the file's path before each write."""
    usual = checkpoint_storage.write_bytes

    def write_bytes(file: Any, data: Any) -> None:
        behave(file.name)
        usual(file, data)

    checkpoint_storage.write_bytes = write_bytes
    try:
        yield
    finally:
        checkpoint_storage.write_bytes = usual
