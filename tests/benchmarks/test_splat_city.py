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
