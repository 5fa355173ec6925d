"""The capture of a city whose photographs show 3D Gaussians: poses, seed points and tracks agree."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nerfstudio.data.utils import colmap_parsing_utils as colmap
from PIL import Image

from benchmarks.captures.splat_city import main
from ns_multigpu.city import City, CityCapture

WORDS = [
    *("--blocks", "1", "--views", "9", "--width", "128", "--height", "72", "--device", "cpu", "--compare", "2"),
    *("--gaussians", "20000", "--seed-points", "1500", "--most-observed", "300"),
]


def read(folder: Path) -> tuple[Any, Any, Any]:
    model = folder / "sparse/0"
    cameras = colmap.read_cameras_binary(model / "cameras.bin")
    return cameras, colmap.read_images_binary(model / "images.bin"), colmap.read_points3D_binary(model / "points3D.bin")


def test_tracks_are_of_what_photographs_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path), *WORDS]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["views"] == 9 and len(report["psnr_to_ray_traced"]) == 2 and min(report["psnr_to_ray_traced"]) > 14
    cameras, images, points = read(tmp_path)
    fx, fy, cx, cy = cameras[1].params
    assert len(images) == 9 and len(points) == 1500
    near, visible, tracks = [], [], 0
    city = CityCapture(City(1, 0), views=9, width=128, height=72)
    for image in images.values():
        depths = city.depth(image.id - 1)
        with Image.open(tmp_path / "images" / image.name) as file:
            picture = np.asarray(file, dtype=float)
        assert picture.shape == (72, 128, 3) and 50 < len(image.xys) <= 300
        for feature, (xy, number) in enumerate(zip(image.xys, image.point3D_ids, strict=True)):
            point = points[int(number)]
            x, y, z = image.qvec2rotmat() @ point.xyz + image.tvec
            assert np.allclose([fx * x / z + cx, fy * y / z + cy], xy, atol=1e-3)
            assert (image.id, feature) in zip(point.image_ids.tolist(), point.point2D_idxs.tolist(), strict=True)
            visible.append(z < 1.05 * float(depths[int(xy[1]), int(xy[0])]))
            near.append(np.abs(picture[int(xy[1]), int(xy[0])] - point.rgb).mean())
    for point in points.values():
        tracks += len(point.image_ids)
    assert tracks == sum(len(image.xys) for image in images.values())
    assert float(np.median(near)) < 25, "photographs have the points' colours there"
    assert np.mean(visible) > 0.95, "what houses hide is not observed"


def test_photographs_differ_if_asked(tmp_path: Path) -> None:
    for name, more in (("usual", []), ("differing", ["--stops", "1", "--noise", "0.02"])):
        main(["--output", str(tmp_path / name), *WORDS, *more])
    files = sorted((tmp_path / "usual/images").iterdir())
    usual, differing = (
        np.stack([np.asarray(Image.open(tmp_path / name / "images" / file.name), dtype=float) for file in files])
        for name in ("usual", "differing")
    )
    brighter = differing.mean((1, 2, 3)) / usual.mean((1, 2, 3))
    held_out = np.arange(9) % 8 == 0
    assert np.allclose(brighter[held_out], 1, atol=0.01) and np.ptp(brighter[~held_out]) > 0.2
    assert 2 < np.std(differing[0] - usual[0]) < 8, "noise of 0.02 of 255, also in held-out photographs"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gaussians", "3", "--seed-points", "2"], "give 4 --gaussians at least"),
        (["--noise", "-1"], "--noise from 0 on"),
        (["--seed-points", "30000"], "--seed-points 30000: give 1 to --gaussians 20000"),
        ([], "is not empty: give a new folder"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), *WORDS, *words])
    assert said in capsys.readouterr().err
