"""Frames per second of `ns-multigpu render`, with and without encoding, compared with nerfstudio's own loop with
gsplat.

    python -m benchmarks.looking.frames --points 8000000 --sizes 1920x1080 3840x2160 --gpus 1 --json out.json
    python -m benchmarks.looking.frames --points 20000 --sizes 160x90 --frames 8 --gpus 2 --device cpu

The model is a city of so many Gaussians (see `scenes.city_model`), written once as a checkpoint; frames fly over it.
Rows are

- `draw`: frames drawn, copied to the host as bytes and dropped;
- `film`: the same, encoded to an mp4 as `ns-multigpu render` does;
- `peer draw`, `peer film`: nerfstudio's `_render_trajectory_video` with Splatfacto's own rendering by gsplat, on one
  GPU, to images that are dropped and to a video. Needs a GPU.

Seconds count from when the model is loaded and one frame is drawn to when all frames are written.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from nerfstudio.configs.method_configs import all_methods
from nerfstudio.models.splatfacto import SplatfactoModel
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks.lib.report import write_report
from benchmarks.scenes.city_model import CityScene, make_model
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.plugin.launch.launcher import run_workers
from ns_multigpu.plugin.tools import rendering
from ns_multigpu.plugin.tools.film import FilmParts
from ns_multigpu.plugin.tools.frames import Look
from ns_multigpu.plugin.tools.models import ToolConfig, ToolMachine
from ns_multigpu.plugin.tools.rendering import FilmRendering
from ns_multigpu.plugin.tools.shots import CameraPath

MODES = ("draw", "film", "peer draw", "peer film")


@dataclass(frozen=True)
class Timed:
    """A rendering whose seconds are written to a file: see `models.Work`.

    Attributes:
        work: the rendering. way: one of `MODES`. seconds: the file to write, on rank 0.
    """

    work: FilmRendering
    way: str
    seconds: Path
    test_mode: Any = "inference"

    def run(self, run: Any, checkpoint: Path, pipeline: Any) -> None:
        """Render the frames and write the seconds they took. Every rank calls it."""
        what = self.work.what
        assert isinstance(what, CameraPath)
        pipeline.eval()
        cameras = what.shots(pipeline).frames
        first = rendering._Artist(pipeline, replace(what.shots(pipeline), frames=cameras[:1]))
        first.draw(cameras[0], pipeline.world.is_main, owners=False)
        rendering._meet(pipeline.world)
        began = time.perf_counter()
        if self.way == "draw":
            usual = FilmParts.put, FilmParts.finish, rendering.put_together
            FilmParts.put = _dropped  # type: ignore[method-assign]
            rendering.put_together = lambda parts, output: None
            try:
                self.work.run(run, checkpoint, pipeline)
            finally:
                FilmParts.put, FilmParts.finish, rendering.put_together = usual  # type: ignore[method-assign]
        elif self.way == "film":
            self.work.run(run, checkpoint, pipeline)
        else:
            _peer(pipeline, what, self.work.output, film=self.way == "peer film")
        if pipeline.world.is_main:
            self.seconds.write_text(str(time.perf_counter() - began))


def _dropped(parts: FilmParts, number: int, frame: Any) -> None:
    if frame is not None:
        frame.array()


def _peer(pipeline: Any, path: CameraPath, output: Path, *, film: bool) -> None:
    """Run nerfstudio's own loop with Splatfacto's own rendering."""
    from nerfstudio.cameras.camera_paths import get_path_from_json
    from nerfstudio.scripts import render

    model = pipeline.model
    model.get_outputs = lambda camera: SplatfactoModel.get_outputs(model, camera)
    model.strategy = SimpleNamespace(absgrad=False)  # its rendering asks; ours has a densifier instead
    usual = render.media.write_image
    render.media.write_image = lambda *_, **__: None
    content = json.loads(path.path.read_text())
    try:
        render._render_trajectory_video(
            pipeline, get_path_from_json(content), output_filename=output, rendered_output_names=["rgb"],
            seconds=content["seconds"], output_format="video" if film else "images",
        )  # fmt: skip
    finally:
        render.media.write_image = usual
        del model.get_outputs, model.strategy


def write_run(folder: Path, points: int, device: str, width: int, height: int) -> tuple[Path, list[View]]:
    """Write a run folder with a model of a city. Return its config.yml and views of the city."""
    from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

    scene = CityScene(points, width, height, views=8)
    model = make_model(scene, World.single(device))
    capture = folder / "capture"
    capture.mkdir(parents=True)
    frames: list[dict[str, Any]] = []
    for index in range(2):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(capture / f"{index}.png")
        pose = np.eye(4)
        pose[0, 3] = index
        frames.append({"file_path": f"{index}.png", "transform_matrix": pose.tolist(), "w": 8, "h": 8, "fl_x": 8.0,
                       "fl_y": 8.0, "cx": 4.0, "cy": 4.0})  # fmt: skip
    (capture / "transforms.json").write_text(json.dumps({"frames": frames}))
    config: Any = all_methods["splatfacto-batch"]
    config = replace(config, output_dir=folder, experiment_name="city", timestamp="run")
    config.pipeline.datamanager.dataparser = NerfstudioDataParserConfig(data=capture, eval_mode="all")
    models = config.get_base_dir() / "nerfstudio_models"
    models.mkdir(parents=True)
    config.save_config()
    state = {f"_model.gauss_params.{name}": value.cpu() for name, value in model.params.items()}
    torch.save({"step": 30000, "pipeline": state, "optimizers": {}, "schedulers": {}, "scalers": {}},
               models / "step-000030000.ckpt")  # fmt: skip
    return config.get_base_dir() / "config.yml", scene.cameras()


def write_path(file: Path, views: list[View], frames: int, width: int, height: int) -> None:
    """Write a camera path that starts from each view in turn and moves on from there."""
    cameras: list[dict[str, Any]] = []
    for index in range(frames):
        view = views[index * len(views) // frames]
        pose = torch.linalg.inv(view.viewmat.cpu().double())
        pose[:3, 1:3] *= -1  # OpenGL axes
        pose[:3, 3] += pose[:3, 0] * 0.2 * (index % max(1, frames // len(views)))
        focal = float(view.K[1, 1]) * height / view.height
        fov = float(2 * np.degrees(np.arctan(height / 2 / focal)))
        cameras.append({"camera_to_world": pose.reshape(-1).tolist(), "fov": fov, "aspect": width / height})
    content = {"camera_type": "perspective", "render_height": height, "render_width": width, "seconds": frames / 24}
    file.write_text(json.dumps({**content, "camera_path": cameras}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=8_000_000)
    parser.add_argument("--sizes", nargs="+", default=["1920x1080", "3840x2160"])
    parser.add_argument("--frames", type=int, default=128)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1], help="numbers of devices to try")
    parser.add_argument("--ways", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options, console, rows = arguments(), Console(), list[dict[str, Any]]()
    folder = Path(tempfile.mkdtemp(prefix="frames-"))
    try:
        size = [int(word) for word in options.sizes[0].split("x")]
        config, views = write_run(folder, options.points, options.device, size[0], size[1])
        for wanted in options.sizes:
            width, height = (int(word) for word in wanted.split("x"))
            path = folder / f"{wanted}.json"
            write_path(path, views, options.frames, width, height)
            for gpus in options.gpus:
                for way in options.ways:
                    if way.startswith("peer") and (options.device == "cpu" or gpus > 1):
                        continue
                    seconds = _measured(folder, config, path, way, gpus, options)
                    rows.append({"size": wanted, "devices": gpus, "way": way, "frames": options.frames,
                                 "fps": options.frames / seconds})  # fmt: skip
                    console.print(rows[-1])
    finally:
        shutil.rmtree(folder)
    table = Table("size", "devices", "way", "frames a second")
    for row in rows:
        table.add_row(row["size"], str(row["devices"]), row["way"], f"{row['fps']:.1f}")
    console.print(table)
    write_report(options.json, points=options.points, rows=rows)


def _measured(folder: Path, config: Path, path: Path, way: str, gpus: int, options: argparse.Namespace) -> float:
    """Return the seconds for all frames."""
    seconds_file, output = folder / "seconds", folder / "out.mp4"
    seconds_file.unlink(missing_ok=True)
    (checkpoint,) = (config.parent / "nerfstudio_models").glob("*.ckpt")
    work: Any = Timed(FilmRendering(CameraPath(path), output, Look()), way, seconds_file)
    tool = ToolConfig(config, checkpoint, work, ToolMachine(options.device, gpus), {"strategy": "batch"})
    if gpus > 1:
        run_workers(tool, gpus)
    else:
        worker = tool.setup()
        worker.setup()
        worker.train()
    return float(seconds_file.read_text())


if __name__ == "__main__":
    sys.exit(main())
