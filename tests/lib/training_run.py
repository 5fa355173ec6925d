"""A small capture on disk and a complete training run on it, in this process, with bounded rounding errors.

Adam divides gradients by their own size. If one is nearly zero, the rounding of another order of sums becomes a step
of full length. So the run is in double precision, and Adam's eps is far above the rounding of gradients and
far below gradients that matter.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.configs.method_configs import all_methods
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from numpy.typing import NDArray
from PIL import Image

from ns_multigpu.core.dist.collectives import all_gather_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import names
from ns_multigpu.plugin.capture.split_lists import ListedNerfstudio
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from ns_multigpu.primitives.registry import PRIMITIVES
from tests.lib.captures import transforms

TRAIN, HELD_OUT, POINTS = 8, 1, 60


@dataclass
class TinyDataParserConfig(NerfstudioDataParserConfig):
    """The capture that `write_capture` wrote, with random seed points."""

    _target: type = field(default_factory=lambda: TinyDataParser)
    data: Path = Path()
    downscale_factor: int | None = 1


class TinyDataParser(ListedNerfstudio):
    """See TinyDataParserConfig."""

    def _generate_dataparser_outputs(self, split: str = "train", **_: Any) -> Any:
        outputs = super()._generate_dataparser_outputs(split)
        g = torch.Generator().manual_seed(1)
        outputs.metadata["points3D_xyz"] = (torch.rand(POINTS, 3, generator=g) - 0.5) * 0.8
        outputs.metadata["points3D_rgb"] = torch.randint(0, 256, (POINTS, 3), generator=g, dtype=torch.uint8)
        return outputs


def write_capture(
    folder: Path, *, alpha: bool = False, masks: bool = False, wide: bool = True, taller: int = 0, train: int = TRAIN
) -> None:
    """Views around a blob, most of another size than the next; RGBA images and masks where asked for.

    Args:
        folder: to write to.
        alpha, masks: whether images have them.
        wide: whether sizes differ.
        taller: pixels that are added below each.
        train: views to train on.
    """
    folder.mkdir(parents=True)
    random = np.random.default_rng(5)
    frames = []
    for i in range(TRAIN + HELD_OUT):
        width, height = (28 + 4 * (i % 3), 24 + 2 * (i % 2)) if wide else (28, 24)
        angle = 2 * math.pi * i / (TRAIN + HELD_OUT)
        eye = np.array([2 * math.cos(angle), 2 * math.sin(angle), 0.5])
        back = eye / np.linalg.norm(eye)
        right = np.cross([0.0, 0.0, 1.0], back)
        right /= np.linalg.norm(right)
        pose = np.eye(4)
        pose[:3] = np.stack([right, np.cross(back, right), back, eye], axis=1)
        coarse = Image.fromarray(random.integers(0, 256, (6, 7, 4 if alpha else 3), dtype=np.uint8))
        coarse.resize((width, height + taller), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
        frame: dict[str, Any] = {
            "file_path": f"{i}.png", "transform_matrix": pose.tolist(), "w": width, "h": height + taller,
            "fl_x": 30.0 + i, "fl_y": 31.0 + i, "cx": width / 2 + 0.3, "cy": height / 2 - 0.2,
        }  # fmt: skip
        if masks:
            covered = (random.random((height + taller, width)) > 0.3).astype(np.uint8) * 255
            Image.fromarray(covered).save(folder / f"mask_{i}.png")
            frame["mask_path"] = f"mask_{i}.png"
        frames.append(frame)
    names = [f"{i}.png" for i in range(TRAIN + HELD_OUT)]
    splits = {"train_filenames": names[:train], "val_filenames": names[TRAIN:], "test_filenames": names[TRAIN:]}
    (folder / "transforms.json").write_text(json.dumps({"frames": frames, **splits}))


def add_maps(folder: Path, key: str, values_of: Callable[[int], NDArray[Any]]) -> None:
    """Give each frame of a capture a picture of `values_of` its number, under a key of transforms.json."""
    with transforms(folder) as meta:
        for number, frame in enumerate(meta["frames"]):
            frame[key] = f"{key}_{number}.png"
            Image.fromarray(values_of(number)).save(folder / frame[key])


def facing_normals(number: int, size: tuple[int, int] = (12, 14)) -> NDArray[np.uint8]:
    """Return a normal map [h, w, 3] in OpenCV's axes, of surfaces that face the camera at random angles."""
    normals = np.random.default_rng(number).normal(0, 0.3, (*size, 3)) - [0, 0, 1]
    normals /= np.linalg.norm(normals, axis=-1, keepdims=True)
    return np.round(255 * (normals + 1) / 2).astype(np.uint8)


def sky_mask(number: int, size: tuple[int, int] = (12, 14)) -> NDArray[np.uint8]:
    """Return a mask whose upper third, and a patch below, are sky."""
    values = np.zeros(size, np.uint8)
    values[: size[0] // 3] = 255
    values[-3:, number : number + 4] = 255
    return values


def sums_over_points(model: Any, world: World) -> dict[str, Any]:
    """Of each parameter the sum over the whole model's points, and how many there are."""
    whole = {
        name: all_gather_rows(value.detach(), world)[0] if model.sharded else value.detach()
        for name, value in model.gauss_params.items()
    }
    return {**{name: value.sum(0) for name, value in whole.items()}, "count": len(whole["means"])}


def train_single(
    world: World, folder: Path, options: Mapping[str, Any], strategy: str, fused: str, steps: int = 12
) -> dict[str, Any]:
    """Return a run on `folder`/tiny in single precision, with an Adam eps far above rounding; and its sums.

    Args:
        options: of `follow`, with the primitive. fused: of `--fused-steps`.
    """
    kind = PRIMITIVES[options["pipeline.model.primitive"]]
    calm = {f"optimizers.{name}.optimizer.eps": 1e-4 for name in names(kind.schema)}
    options = {**options, **calm, "pipeline.strategy": strategy, "fused_steps": fused}
    runs = folder / f"{fused}-{strategy}-{world.size}"
    return sums_over_points(follow(world, folder / "tiny", runs, options, steps, 1, double=False).pipeline.model, world)


def small_config(capture: Path, output: Path, method: str = "splatfacto-batch", eps: float | None = None) -> Any:
    """Return a method's configuration for a run on CPUs, without a viewer and evaluations.

    Args:
        output: folder of run folders; this one is METHOD/now in its folder `run`. eps: of all optimizers.
    """
    config: Any = copy.deepcopy(all_methods[method])
    config.machine.device_type, config.vis = "cpu", ""
    config.output_dir, config.timestamp, config.experiment_name = output, "now", "run"
    config.steps_per_eval_image = config.steps_per_eval_all_images = config.steps_per_save = 10**6
    config.pipeline.datamanager.dataparser = TinyDataParserConfig(data=capture)
    for group in config.optimizers.values() if eps is not None else ():
        group["optimizer"].eps = eps
    return config


def set_up(world: World, config: Any) -> DistributedTrainer:
    """Return the trainer of a configuration on these ranks, which has not taken a step."""
    config.get_base_dir().mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    World.from_env = staticmethod(lambda *_, **__: world)  # type: ignore[method-assign]
    trainer = DistributedTrainer(config)
    trainer.setup()
    return trainer


def save_nothing(trainer: DistributedTrainer) -> None:
    """Keep a run from writing models, for a test that does not look at them."""
    trainer.save_checkpoint = lambda *_, **__: None  # type: ignore[method-assign]
    trainer.save_last = lambda _, look: look() or trainer.base_dir  # type: ignore[method-assign]


def follow(
    world: World, capture: Path, runs: Path, options: Mapping[str, Any], steps: int, views_per_rank: int,
    *, method: str = "splatfacto-batch", double: bool = True,
    ready: Callable[[DistributedTrainer], None] = lambda _: None,
) -> DistributedTrainer:  # fmt: skip
    """Train for so many steps and return the trainer, with everything that it trained.

    Args:
        world: this process's.
        capture: folder of the capture.
        runs: folder to write run folders to, another one for each rank, or one for all where there are machines.
        options: "a.b.c" -> value, beginning at the trainer's config.
        steps: steps of `views_per_rank` views a rank.
        method: the method to train with.
        double: whether to train in double precision.
        ready: called before the first step.
    """
    output = runs / (f"rank-{world.rank}" if world.machines == 1 else "all")  # machines share it
    config = small_config(capture, output, method, eps=1e-7)
    config.max_num_iterations, config.max_num_images, config.steps_per_checksum = steps, None, 1
    config.pipeline.views_per_rank = views_per_rank
    for name, value in options.items():
        *parents, last = name.split(".")
        place: Any = config
        for parent in parents:
            place = place[parent] if isinstance(place, dict) else getattr(place, parent)
        if isinstance(place, dict):
            place[last] = value
        elif hasattr(place, last):
            setattr(place, last, value)
        else:
            raise AttributeError(f"no option {name}")
    config.get_base_dir().mkdir(parents=True, exist_ok=world.machines > 1)
    torch.manual_seed(3)
    World.from_env = staticmethod(lambda *_, **__: world)  # type: ignore[method-assign]
    trainer = DistributedTrainer(config)
    save_nothing(trainer)
    trainer.setup()
    ready(trainer)
    if not double:
        trainer.train()
        return trainer
    trainer.pipeline.model.double()
    trainer.pipeline.held_out_quality = lambda _: None  # type: ignore[method-assign]  # held-out views stay single
    cameras = trainer.pipeline.datamanager.train_cameras_on_device
    cameras.camera_to_worlds = cameras.camera_to_worlds.double()
    torch.set_default_dtype(torch.float64)
    try:
        trainer.train()
    finally:
        torch.set_default_dtype(torch.float32)
    return trainer
