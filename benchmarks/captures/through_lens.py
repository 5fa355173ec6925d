"""Resamples a COLMAP capture of pinhole photographs as if a lens had taken them, so that direct training through lenses
can be compared with undistorting, where no capture with distortion is at hand.

    python -m benchmarks.captures.through_lens --capture fox --output fox-lens --model OPENCV --scale 8

A pixel is the mean of 16 samples of the photograph along the lens's rays. The lens's focal length is the shortest with
which all rays lie within the photograph. Poses and seed points are the capture's.
"""

import argparse
import shutil
import struct
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

LENSES = {"OPENCV": (4, (-0.25, 0.06, 1e-3, -1e-3)), "OPENCV_FISHEYE": (5, (-0.1, 0.02, -5e-3, 1e-3))}
"""COLMAP's number of each model, and its coefficients: k1, k2, p1, p2, or k1 to k4."""
SAMPLES = 4
"""Samples of a pixel along each side."""
_PINHOLE = struct.Struct("<QiiQQ4d")

Floats = NDArray[np.float64]


def pinhole_of(model: Path) -> tuple[tuple[int, int], Floats]:
    """Return the size and fx, fy, cx, cy of a reconstruction's only camera.

    Raises:
        ValueError: it has several cameras, or one that is no PINHOLE.
    """
    content = (model / "cameras.bin").read_bytes()
    count, _, kind, width, height, *lens = _PINHOLE.unpack_from(content)
    if count != 1 or kind != 1:
        raise ValueError(f"{model}: one camera of the model PINHOLE is needed")
    return (width, height), np.array(lens)


def rays(size: tuple[int, int], focal: float, coefficients: Floats, *, fisheye: bool) -> Floats:
    """Return the slopes [h, w, 2] of the samples of a lens's image."""
    width, height = size
    x, y = (np.arange(SAMPLES * side) / SAMPLES + 0.5 / SAMPLES - side / 2 for side in (width, height))
    grid = np.stack(np.meshgrid(x, y), -1).reshape(1, -1, 2) / focal
    if fisheye:
        found = cv2.fisheye.undistortPoints(grid, np.eye(3), coefficients)
    else:
        ends = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 100, 1e-12)
        found = cv2.undistortPointsIter(grid, np.eye(3), coefficients, np.eye(3), np.eye(3), ends)
    return np.asarray(found, np.float64).reshape(SAMPLES * height, SAMPLES * width, 2)


def main() -> None:
    """Write the capture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", type=Path, required=True, help="folder with images and sparse/0")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--model", choices=LENSES, default="OPENCV", help="the lens")
    parser.add_argument("--scale", type=int, default=8, help="the new images' sides are 1/SCALE of the photographs'")
    given = parser.parse_args()
    model = given.capture / "sparse" / "0"
    try:
        (width, height), (fx, fy, cx, cy) = pinhole_of(model)
        if not 1 <= given.scale <= min(width, height):
            parser.error(f"--scale {given.scale}: give 1 to {min(width, height)}.")
        photographs = sorted((given.capture / "images").iterdir())
        folder = given.output / "sparse" / "0"
        folder.mkdir(parents=True)
        (given.output / "images").mkdir()
    except (OSError, ValueError, struct.error) as error:
        parser.error(str(error))
    size = width // given.scale, height // given.scale
    number, coefficients = LENSES[given.model]
    focal = fx / given.scale
    while True:
        slopes = rays(size, focal, np.array(coefficients), fisheye=number == 5)
        places = slopes * (fx, fy) + (cx, cy)
        if (places > 1).all() and (places < (width - 1, height - 1)).all():
            break
        focal *= 1.01
    for name in ("images.bin", "points3D.bin"):
        shutil.copy(model / name, folder / name)
    lens = (focal, focal, size[0] / 2, size[1] / 2, *coefficients)
    (folder / "cameras.bin").write_bytes(struct.pack("<QiiQQ8d", 1, 1, number, *size, *lens))
    where = (places - 0.5).astype(np.float32)  # OpenCV counts from a pixel's centre
    for path in photographs:
        photograph = np.asarray(cv2.imread(str(path)))
        samples = cv2.remap(photograph, where[..., 0], where[..., 1], cv2.INTER_LINEAR)
        image = cv2.resize(samples, size, interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(given.output / "images" / path.name), image, [cv2.IMWRITE_JPEG_QUALITY, 98])
    print(f"{given.output}: {size[0]}x{size[1]} pixels, focal length {focal:.1f}")


if __name__ == "__main__":
    main()
