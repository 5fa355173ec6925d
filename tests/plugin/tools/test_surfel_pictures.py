"""Pictures of 2D Gaussians have an image of normals, on any ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.scene_box import OrientedBox
from PIL import Image

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.tools.frames import Look
from ns_multigpu.plugin.tools.rendering import FilmRendering
from ns_multigpu.plugin.tools.shots import CameraPath, Spiral
from tests.lib.ranks import run_ranks
from tests.lib.rendering import camera, make_pipeline, write_capture
from tests.lib.trained_run import write_path

SIZE = (50, 71)


def look(world: World, capture: Path, strategy: str) -> dict[str, Any]:
    options: dict[str, Any] = {"primitive": "2dgs", "background_color": "white", "normal_loss": 0.0}
    pipeline = make_pipeline(world, capture, strategy, (0, 50, 90), **options)
    params = pipeline.model.gauss_params
    params["scales"] = torch.nn.Parameter(params["scales"].detach()[:, :2].clone())
    pipeline.eval()
    with torch.no_grad():
        if world.size == 1:
            return dict(pipeline.model.get_outputs_for_camera(camera(*SIZE)))
        pipeline.model.crop_box = OrientedBox.from_params((9.0, 9.0, 9.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        empty = pipeline.renders.render(camera(*SIZE), roots=range(world.size)) or {}
        assert empty["normals"].shape == (SIZE[1], SIZE[0], 3)
        pipeline.model.crop_box = None
        return dict(pipeline.renders.render(camera(*SIZE), roots=range(world.size)) or {})


def render(world: World, capture: Path, strategy: str, folder: Path) -> None:
    """As `ns-multigpu render`; the capture is small, and so are the images."""
    pipeline = make_pipeline(world, capture, strategy, (0, 50, 90), primitive="2dgs", normal_loss=0.0)
    params = pipeline.model.gauss_params
    params["scales"] = torch.nn.Parameter(params["scales"].detach()[:, :2].clone())
    checkpoint = capture / "transforms.json"  # a file: it is looked at for when it was written
    FilmRendering(Spiral(0.2, 10), folder, Look(("normals", "rgb")), image_format="png").run(None, checkpoint, pipeline)
    with pytest.raises(InputError, match="normals: panoramas have no such output"):
        path = CameraPath(write_path(capture / f"{world.rank}.json", 1, camera_type="equirectangular", crop=None))
        FilmRendering(path, folder, Look(("normals",))).run(None, checkpoint, pipeline)


def test_films_have_normals(tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "tiny")
    render(World.single(), capture, "single", tmp_path / "one")
    run_ranks(render, 2, capture, "tile", tmp_path / "two")
    for frame in ("00000.png", "00001.png"):
        with Image.open(tmp_path / "one" / frame) as one, Image.open(tmp_path / "two" / frame) as two:
            expected, found = (np.asarray(image, dtype=np.int32) for image in (one, two))
        normals = expected[:, : expected.shape[1] // 2]
        assert normals.std() > 5 and np.abs(normals - expected[:, expected.shape[1] // 2 :]).max() > 20
        assert np.abs(found - expected).max() <= 1


def test_normals_are_drawn_by_all_ranks(tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "tiny")
    expected = look(World.single(), capture, "single")
    directions = (expected["normals"] - 0.5) * 2 / expected["accumulation"].clamp(min=1e-6)
    lengths = directions.norm(dim=-1)[expected["accumulation"][..., 0] > 0.5]
    assert len(lengths) > 20 and float(lengths.max()) <= 1 + 1e-4
    for found in run_ranks(look, 2, capture, "tile"):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
