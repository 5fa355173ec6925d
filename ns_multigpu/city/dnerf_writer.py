"""Writes a time-varying capture in the layout of D-NeRF's scenes (Pumarola et al. 2021), which nerfstudio's dataparser
`dnerf` reads:

    DIR/train/aerial_000001.png …   DIR/val/…   DIR/test/…
    DIR/transforms_train.json, transforms_val.json, transforms_test.json

A view's file, pose and time stand in its split's json. Validation and test views are the same: those held out. Lengths
are scaled so that all cameras are within 1 of their middle. There are no seed points in this layout.
"""

import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from ns_multigpu.city.capture import CityCapture
from ns_multigpu.city.colmap_writer import prepare_folder
from ns_multigpu.city.side_by_side import side_by_side

SPLITS = ("train", "val", "test")


def write_dnerf(
    capture: CityCapture,
    folder: Path,
    *,
    overwrite: bool = False,
    device: torch.device | str = "cpu",
    workers: int = 2,
    progress: Callable[[Iterable[int], int], Iterable[int]] = lambda done, total: done,
) -> None:
    """Render all views of a capture into a folder in D-NeRF's layout.

    Args:
        capture: to write; time-varying. folder, overwrite, device, workers, progress: see `write_colmap`.

    Raises:
        ValueError: nothing moves in the capture.
        FileExistsError: the folder holds something and overwrite is not given.
        PermissionError: the folder cannot be written to.
    """
    if not capture.time_varying:
        raise ValueError("D-NeRF's layout is for scenes that move: give --time-varying")
    prepare_folder(folder, overwrite)
    poses = torch.eye(4, dtype=torch.float64).repeat(len(capture), 1, 1)
    poses[:, :3] = capture.c2w.double()
    poses[:, :3, 3] -= poses[:, :3, 3].mean(dim=0)
    poses[:, :3, 3] /= poses[:, :3, 3].abs().max()
    angle = 2 * math.atan(0.5 * capture.width / capture.fx)
    jobs: list[tuple[int, Path]] = []
    for split in SPLITS:
        (folder / split).mkdir(exist_ok=True)
        numbers = capture.split(split).tolist()
        jobs += [(view, folder / split / f"{capture.name(view)}.png") for view in numbers]
        frames = [
            {
                "file_path": f"./{split}/{capture.name(view)}",
                "time": float(capture.times[view]),
                "transform_matrix": poses[view].tolist(),
            }
            for view in numbers
        ]
        transforms = {"camera_angle_x": angle, "frames": frames}
        (folder / f"transforms_{split}.json").write_text(json.dumps(transforms, indent=1), "utf8")

    for _ in progress(side_by_side(partial(_write_view, capture, device), jobs, workers, device), len(jobs)):
        pass


def _write_view(capture: CityCapture, device: torch.device | str, job: tuple[int, Path]) -> int:
    """Render a view into its file."""
    from PIL import Image  # only here: rendering needs no more than torch, numpy and scipy

    view, path = job
    Image.fromarray(capture.image(view, device).numpy()).save(path)
    return view
