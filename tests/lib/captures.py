"""Small captures on disk in nerfstudio's format, and the datamanager over them."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from PIL import Image

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager, DistributedDataManagerConfig
from ns_multigpu.plugin.launch.process_world import set_world

WIDTH, HEIGHT = 24, 16


def write_capture(folder: Path, views: int = 12, suffix: str = ".png", masks: bool = False, **meta: Any) -> Path:
    """Return `views` pictures on a circle; `meta` goes into transforms.json."""
    (folder / "images").mkdir(parents=True)
    frames = []
    for index in range(views):
        rng = np.random.default_rng(index)
        name = f"images/photo_{index:02d}{suffix}"
        Image.fromarray(rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)).save(folder / name)
        angle = 2 * math.pi * index / views
        c, s = math.cos(angle), math.sin(angle)
        matrix = [[c, 0, s, 2 * s], [0, 1, 0, 0.1 * index], [-s, 0, c, 2 * c], [0, 0, 0, 1]]
        frame: dict[str, Any] = {"file_path": name, "transform_matrix": matrix}
        if masks:
            frame["mask_path"] = f"images/mask_{index:02d}.png"
            mask = rng.integers(0, 2, (HEIGHT, WIDTH), dtype=np.uint8) * 255
            Image.fromarray(mask).save(folder / frame["mask_path"])
        frames.append(frame)
    whole = {"w": WIDTH, "h": HEIGHT, "fl_x": 20.0, "fl_y": 20.0, "cx": 12.0, "cy": 8.0, **meta, "frames": frames}
    (folder / "transforms.json").write_text(json.dumps(whole))
    return folder


@contextmanager
def transforms(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a capture's transforms.json, which is written with the changes made to them."""
    file = folder / "transforms.json"
    meta = json.loads(file.read_text())
    yield meta
    file.write_text(json.dumps(meta))


def edit(folder: Path, frame: int | None, **values: Any) -> None:
    """Change a frame of transforms.json, or an entry next to the frames."""
    with transforms(folder) as meta:
        (meta if frame is None else meta["frames"][frame]).update(values)


def manager(folder: Path, world: World, *, eval_mode: str = "interval", **options: Any) -> DistributedDataManager:
    """Return a datamanager for training on the capture in `folder`."""
    parser = NerfstudioDataParserConfig(
        data=folder, load_3D_points=False, eval_mode=eval_mode, eval_interval=4, downscale_factor=1  # type: ignore
    )  # fmt: skip
    return read_by(parser, world, **options)


def read_by(parser: Any, world: World | None = None, *, mode: Any = "val", **options: Any) -> DistributedDataManager:
    """Return a datamanager for a dataparser's options, alone by default; `mode` is nerfstudio's `test_mode`."""
    world = world or World.single()
    set_world(world)
    try:
        config = DistributedDataManagerConfig(dataparser=parser, **options)
        return DistributedDataManager(config, device=world.device, test_mode=mode)
    finally:
        set_world(None)
