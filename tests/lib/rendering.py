"""A pipeline over a small capture whose points are spread over ranks as a test wants, and cameras to look at it."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.configs.method_configs import all_methods

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.splats.pipeline import DistributedPipeline
from tests.lib import training_run
from tests.lib.captures import transforms
from tests.strategies.scene import make_points

POINTS = 90


def write_capture(folder: Path, held_out: int = 5, **kind: bool) -> Path:
    """Return a capture of nine views, some of them held out; see `training_run.write_capture`."""
    training_run.write_capture(folder, **kind)
    with transforms(folder) as meta:
        names = [frame["file_path"] for frame in meta["frames"]]
        meta["train_filenames"] = names[held_out:]
        meta["val_filenames"] = meta["test_filenames"] = names[:held_out]
    return folder


def make_pipeline(
    world: World, capture: Path, strategy: str = "tile", bounds: Sequence[int] | None = None, **model: Any
) -> DistributedPipeline:
    """Return a pipeline of one rank of `world`; if points are spread, they are by `bounds` [ranks + 1]."""
    config: Any = copy.deepcopy(all_methods["splatfacto-batch"].pipeline)
    config.strategy = strategy
    config.datamanager.dataparser = training_run.TinyDataParserConfig(data=capture)
    for name, value in model.items():
        assert hasattr(config.model, name)
        setattr(config.model, name, value)
    torch.manual_seed(3)
    set_world(world)
    try:
        pipeline: DistributedPipeline = config.setup(device=str(world.device), test_mode="val")
    finally:
        set_world(None)
    spread = pipeline.strategy.placement.replicated is False
    rows = slice(bounds[world.rank], bounds[world.rank + 1]) if bounds is not None and spread else slice(None)
    for name, value in make_points(POINTS, torch.float32).params.items():
        pipeline.model.gauss_params[name] = torch.nn.Parameter(value.detach()[rows].clone().to(world.device))
    if pipeline.model.shard_index is not None:
        pipeline.model.shard_index.hold(None, pipeline.model.gauss_params["means"])
        pipeline.model.count_shards()
    pipeline.model.step = 30000
    return pipeline


def camera(width: int, height: int) -> Cameras:
    """Return one that looks at the scene from (2, 0, 0.5)."""
    pose = torch.tensor([[0.0, -0.24254, 0.97014, 2.0], [1.0, 0, 0, 0.1], [0, 0.97014, 0.24254, 0.5]])
    focal = torch.tensor([[0.5 * width]])
    return Cameras(
        pose[None], focal, focal, torch.tensor([[width / 2]]), torch.tensor([[height / 2]]), width=width, height=height
    )
