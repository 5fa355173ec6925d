"""Writes a capture in COLMAP's layout, for other programs.

    DIR/images/aerial_000000.png …
    DIR/sparse/0/cameras.bin, images.bin, points3D.bin
    DIR/depth/aerial_000000.png …   (if asked for: 16 bits, or npy with float32 metres; 0 for sky)
    DIR/times.txt                   (of a time-varying capture: name and time of each view)

The binary layout is that of COLMAP's documentation, "Output format" (https://colmap.github.io/format.html).
"""

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ns_multigpu.city.capture import CityCapture
from ns_multigpu.city.seed_points import SeedPoints
from ns_multigpu.city.side_by_side import side_by_side

_PINHOLE = 1
"""COLMAP's number of the camera model PINHOLE: fx, fy, cx, cy."""


def quaternion(rotation: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return unit quaternions [n, 4] (w first, w >= 0) of rotations [n, 3, 3].

    The largest of the four components is found from the trace and the diagonal, the others from it, so that none is
    divided by a small number (Shepperd, "Quaternion from rotation matrix", 1978).
    """
    r = rotation
    diagonal = np.stack([r[:, 0, 0], r[:, 1, 1], r[:, 2, 2]], axis=1)
    trace = diagonal.sum(axis=1)
    # Squares of the components, times four.
    squares = np.concatenate([1 + trace[:, None], 1 + 2 * diagonal - trace[:, None]], axis=1)
    products = np.empty((len(r), 4, 4))  # four times the products of components i and j
    products[:, range(4), range(4)] = squares
    for i, j, value in (
        (0, 1, r[:, 2, 1] - r[:, 1, 2]), (0, 2, r[:, 0, 2] - r[:, 2, 0]), (0, 3, r[:, 1, 0] - r[:, 0, 1]),
        (1, 2, r[:, 0, 1] + r[:, 1, 0]), (1, 3, r[:, 0, 2] + r[:, 2, 0]), (2, 3, r[:, 1, 2] + r[:, 2, 1]),
    ):  # fmt: skip
        products[:, i, j] = products[:, j, i] = value
    result = products[np.arange(len(r)), squares.argmax(axis=1)]
    result /= np.linalg.norm(result, axis=1, keepdims=True)
    return np.where(result[:, :1] < 0, -result, result)


Observed = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Observations of a view: indices [n] of seed points, and where [n, 2], pixels."""


def write_model(
    folder: Path, capture: CityCapture, suffix: str, points: SeedPoints, observed: Sequence[Observed] = ()
) -> None:
    """Write cameras.bin, images.bin and points3D.bin; views and points are numbered from 1.

    Args:
        suffix: of the photographs' files. observed: by each view; nothing by any unless given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "cameras.bin").open("wb") as file:
        file.write(struct.pack("<Q", 1))
        file.write(struct.pack("<iiQQ", 1, _PINHOLE, capture.width, capture.height))
        file.write(struct.pack("<4d", capture.fx, capture.fy, capture.cx, capture.cy))
    viewmats = capture.viewmats().double().numpy()
    rotations = quaternion(viewmats[:, :3, :3])
    with (folder / "images.bin").open("wb") as file:
        file.write(struct.pack("<Q", len(capture)))
        for view in range(len(capture)):
            file.write(struct.pack("<i7di", view + 1, *rotations[view], *viewmats[view, :3, 3], 1))
            features = np.zeros(len(observed[view][0]) if observed else 0, [("xy", "<f8", 2), ("point", "<i8")])
            if observed:
                features["point"], features["xy"] = observed[view][0] + 1, observed[view][1]
            file.write(f"{capture.name(view)}{suffix}".encode() + b"\0" + struct.pack("<Q", len(features)))
            file.write(features.tobytes())
    record = np.dtype(
        [("id", "<u8"), ("xyz", "<f8", 3), ("rgb", "u1", 3), ("error", "<f8"), ("track_length", "<u8")], align=False
    )
    table, tracks = np.zeros(len(points.xyz), record), _tracks(observed)
    table["id"] = np.arange(1, len(table) + 1)
    table["xyz"], table["rgb"] = points.xyz.numpy(), points.rgb.numpy()
    table["error"] = 0.5
    table["track_length"] = np.bincount(tracks["point"], minlength=len(table))
    ends = table["track_length"].cumsum().tolist()
    elements = np.stack([tracks["view"] + 1, tracks["feature"]], axis=1).astype("<i4")
    with (folder / "points3D.bin").open("wb") as file:
        file.write(struct.pack("<Q", len(table)))
        if not observed:
            file.write(table.tobytes())
        for row, begin, end in zip(table, [0, *ends], ends, strict=False) if observed else ():
            file.write(row.tobytes() + elements[begin:end].tobytes())


def _tracks(observed: Sequence[Observed]) -> dict[str, NDArray[np.int64]]:
    """Return of each observation the point, the view and the feature of the view; by points, then views."""
    counts = [len(points) for points, _ in observed]
    point = np.concatenate([np.zeros(0, np.int64), *(points for points, _ in observed)])
    feature = np.concatenate([np.zeros(0, np.int64), *map(np.arange, counts)])
    order = np.argsort(point, kind="stable")
    view = np.repeat(np.arange(len(observed)), counts)
    return {"point": point[order], "view": view[order], "feature": feature[order]}


def prepare_folder(folder: Path, overwrite: bool) -> None:
    """Create an output folder and check that it is writable.

    Raises:
        FileExistsError: it holds something and overwrite is not given, or it is a file.
        PermissionError: it cannot be made or written to.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PermissionError(f"cannot make the folder {folder} ({error.strerror}): choose another") from error
    if any(folder.iterdir()) and not overwrite:
        raise FileExistsError(f"{folder} is not empty: choose another folder, or give --overwrite")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write to {folder}: choose another folder")


def write_colmap(
    capture: CityCapture,
    folder: Path,
    *,
    points: int | None = None,
    image_format: Literal["png", "jpg"] = "png",
    depth: Literal["none", "png", "npy"] = "none",
    depth_unit: float = 1e-3,
    overwrite: bool = False,
    device: torch.device | str = "cpu",
    workers: int = 2,
    progress: Callable[[Iterable[int], int], Iterable[int]] = lambda done, total: done,
) -> None:
    """Render all views of a capture into a folder in COLMAP's layout.

    Args:
        capture: to write.
        folder: where; made if need be.
        points: seed points; None for the capture's default.
        image_format: of the pictures.
        depth: "png" for 16-bit pictures in depth_unit (0: sky, or too far for 16 bits), "npy" for float32 metres.
        depth_unit: metres of one step of a 16-bit depth; the default covers 65 m, so aerial captures need 1e-2.
        overwrite: write into a folder that holds something. Files of the same names are replaced, no others removed.
        device: where views are rendered.
        workers: views rendered side by side (on a CPU each takes one core).
        progress: wraps the iterator over finished views, given their total, as a progress bar does.

    Raises:
        FileExistsError: the folder holds something and overwrite is not given.
        PermissionError: the folder cannot be written to.
    """
    prepare_folder(folder, overwrite)
    write_model(folder / "sparse" / "0", capture, f".{image_format}", capture.seed_points(points, device=device))
    if capture.time_varying:
        times = capture.times.tolist()
        lines = (f"{capture.name(view)}.{image_format} {times[view]:.6f}\n" for view in range(len(capture)))
        (folder / "times.txt").write_text("".join(lines))
    (folder / "images").mkdir(exist_ok=True)
    if depth != "none":
        (folder / "depth").mkdir(exist_ok=True)

    write = partial(_write_view, capture, folder, image_format, depth, depth_unit, device)
    views = range(len(capture))
    for _ in progress(side_by_side(write, views, workers, device), len(capture)):
        pass


def _write_view(
    capture: CityCapture,
    folder: Path,
    image_format: str,
    depth: str,
    depth_unit: float,
    device: torch.device | str,
    view: int,
) -> int:
    """Render a view's picture, and its depth, into the folder. See `write_colmap`."""
    from PIL import Image  # only here: rendering needs no more than torch, numpy and scipy

    name = capture.name(view)
    picture = Image.fromarray(capture.image(view, device).numpy())
    picture.save(folder / "images" / f"{name}.{image_format}", quality=95)  # png knows no quality and ignores it
    if depth == "npy":
        np.save(folder / "depth" / f"{name}.npy", capture.depth(view, device).numpy())
    elif depth == "png":
        steps = np.rint(capture.depth(view, device).numpy() / depth_unit)
        steps[steps > 65535] = 0
        Image.fromarray(steps.astype(np.uint16)).save(folder / "depth" / f"{name}.png")
    return view
