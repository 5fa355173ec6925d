"""A run folder of `tile` with a checkpoint in shards, as it is after training, and a camera path through its scene."""

import json
from pathlib import Path
from typing import Any

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.atomic_save import save
from ns_multigpu.plugin.checkpoint.sharded_state import split_state, without_points
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.run.config import read_config
from ns_multigpu.plugin.tools import rendering
from ns_multigpu.plugin.tools.models import load_model
from ns_multigpu.plugin.tools.rendering import FilmRendering
from tests.lib.ranks import run_ranks
from tests.lib.rendering import make_pipeline, write_capture
from tests.lib.training_run import small_config


def _write(world: World, capture: Path, run: Path, bounds: tuple[int, ...]) -> None:
    pipeline = make_pipeline(world, capture, bounds=bounds)
    tensors, marker = split_state({}, dict(pipeline.model.gauss_params.items()), world)
    state = without_points(pipeline.state_dict(), marker)
    assert save(run / "nerfstudio_models", 7, lambda: state, tensors, {"method": "splatfacto-tile"}, world) == ""


def write_run(folder: Path) -> Path:
    """Write it, with a capture of its own, and return its config.yml."""
    capture = write_capture(folder / "capture")
    config = small_config(capture, folder)
    config.pipeline.strategy, config.method_name = "tile", "splatfacto-tile"
    config.machine.num_devices = 2
    config.get_base_dir().mkdir(parents=True)
    config.save_config()
    run_ranks(_write, 2, capture, config.get_base_dir(), (0, 70, 90))
    return config.get_base_dir() / "config.yml"


def write_path(file: Path, views: int = 3, **more: Any) -> Path:
    """Write a camera path of so many views, with a crop."""
    poses = [[0, -0.24, 0.97, 2 + step / 4, 1, 0, 0, 0.1, 0, 0.97, 0.24, 0.5, 0, 0, 0, 1] for step in range(views)]
    crop = {
        "crop_bg_color": {"r": 10, "g": 20, "b": 30}, "crop_center": [0.0, 0.0, 0.0], "crop_scale": [1.6, 1.6, 1.6],
        "crop_rot": [0.0, 0.0, 0.3],
    }  # fmt: skip
    cameras = [{"camera_to_world": pose, "fov": 60, "aspect": 1.5} for pose in poses]
    content = {"camera_type": "perspective", "render_height": 34, "render_width": 50, "seconds": 1, "crop": crop}
    file.write_text(json.dumps({**content, "camera_path": cameras, **more}))
    return file


def render_run(world: World, run: Path, work: FilmRendering, whole: bool) -> list[str]:
    """Renders; returns the names of the frames that this rank drew, or took part in."""
    set_world(world)
    config: Any = read_config(run)
    config.pipeline.strategy = "batch" if whole else "tile"
    (checkpoint,) = (run.parent / "nerfstudio_models").glob("*.ckpt")
    pipeline = load_model(config, checkpoint, world, work.test_mode)
    drawn: list[str] = []
    usual = rendering._Artist.draw
    rendering._Artist.draw = (  # type: ignore[method-assign]
        lambda self, shot, mine, owners: drawn.append(shot.name) or usual(self, shot, mine, owners)
    )
    try:
        work.run(config, checkpoint, pipeline)
    finally:
        rendering._Artist.draw = usual  # type: ignore[method-assign]
        set_world(None)
    return drawn
