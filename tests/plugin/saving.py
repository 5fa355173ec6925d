"""Small checkpoints, and nerfstudio's way of finding them."""

import os
import shutil
from pathlib import Path

import torch

from ns_multigpu.core.world import World
from ns_multigpu.plugin.checkpoint import save
from ns_multigpu.plugin.checkpoint_verify import states_folder

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
