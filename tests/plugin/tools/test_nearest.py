"""The training photograph that is nearest to a frame, shown next to it."""

from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from PIL import Image
from scipy.spatial.transform import Rotation

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.run.config import read_config
from ns_multigpu.plugin.tools.frames import Look
from ns_multigpu.plugin.tools.models import load_model
from ns_multigpu.plugin.tools.nearest import fitted, nearest_views, width_next_to
from ns_multigpu.plugin.tools.rendering import FilmRendering
from ns_multigpu.plugin.tools.shots import CameraPath, Interpolated
from tests.lib.ranks import run_ranks
from tests.lib.trained_run import render_run, write_path, write_run


def test_the_nearest_view_is_that_of_ns_render() -> None:
    """Its measure, by quaternions, as it is written there."""
    generator = torch.Generator().manual_seed(3)
    turns = Rotation.random(40, np.random.default_rng(3))
    poses = torch.cat([torch.tensor(turns.as_matrix()).float(), torch.randn(40, 3, 1, generator=generator)], 2)

    def cameras(chosen: slice) -> Cameras:
        return Cameras(poses[chosen], 1.0, 1.0, 1.0, 1.0, width=1, height=1)

    quats, expected = turns.as_quat(), list[int]()
    for frame in range(30, 40):
        way = torch.linalg.norm(poses[:30, :, 3] - poses[frame, :, 3], dim=1).numpy()
        expected.append(int(np.argmin(0.7 * way + 0.3 * (1 - (quats[:30] @ quats[frame]) ** 2))))
    assert nearest_views(cameras(slice(30, 40)), cameras(slice(0, 30))) == expected
    assert len(set(expected)) > 4 and nearest_views(cameras(slice(7, 9)), cameras(slice(0, 30))) == [7, 8]


def test_a_photograph_is_shown_whole() -> None:
    wide = fitted(torch.full((10, 40, 3), 0.5), 20, 20)
    assert wide.shape == (20, 20, 3) and wide.dtype == torch.uint8
    assert (wide[8:12] == 128).all() and not wide[:7].any() and not wide[13:].any()
    tall = fitted(torch.full((40, 10, 3), 1.0), 20, 20)
    assert (tall[:, 8:12] == 255).all() and not tall[:, :7].any() and not tall[:, 13:].any()


@pytest.mark.parametrize("kind", ["film", "images"])
def test_nearest_photograph_is_next_to_a_frame(tmp_path: Path, kind: str) -> None:
    run, path = write_run(tmp_path / "runs"), write_path(tmp_path / "path.json", 20)
    output = tmp_path / ("a.mp4" if kind == "film" else "a")
    what, look = CameraPath(path) if kind == "film" else Interpolated("train", 2), Look(("rgb", "depth"))
    size = 1 if kind == "film" else 2
    run_ranks(render_run, size, run, FilmRendering(what, output, look, image_format="png", nearest=True), True)
    names = sorted((tmp_path / "a").glob("*.png"))
    frames = (
        np.stack(list(iio.imiter(output)))
        if kind == "film"
        else np.stack([np.asarray(Image.open(name)) for name in names])
    )
    (checkpoint,) = (run.parent / "nerfstudio_models").glob("*.ckpt")
    pipeline = load_model(read_config(run), checkpoint, World.single(), "test")
    data, shots = pipeline.datamanager.train_dataset, what.shots(pipeline).frames
    width, height = int(shots[0].camera.width), int(shots[0].camera.height)
    right = frames[:, :, 2 * width :].astype(float)
    assert right.shape == (len(shots), height, width_next_to(data, height), 3) and right.shape[2] % 2 == 0
    images = [data.get_image_float32(view) for view in range(len(data))]
    photographs = np.stack([fitted(image, right.shape[2], height).numpy() for image in images])
    poses = torch.cat([shot.camera.camera_to_worlds.reshape(1, 3, 4) for shot in shots])
    expected = nearest_views(Cameras(poses, 1.0, 1.0, 1.0, 1.0, width=1, height=1), data.cameras)
    if kind == "images":
        assert expected[::2] == list(range(len(data) - 1)), "a frame that is a view has its own photograph"
    for frame, view in enumerate(expected):
        errors = np.abs(photographs.astype(float) - right[frame]).mean((1, 2, 3))
        assert errors.argmin() == view and errors[view] <= (15.0 if kind == "film" else 0.0), frame
