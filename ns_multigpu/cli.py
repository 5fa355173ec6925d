"""The command `ns-multigpu`: what nerfstudio's own commands have no place for.

A subcommand is a function with documented, typed arguments in COMMANDS; tyro makes its options from them.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import tyro


def city(
    output: Path,
    blocks: int = 2,
    capture: Literal["aerial", "street"] = "aerial",
    views: int = 200,
    width: int = 960,
    height: int = 540,
    samples: int = 4,
    seed: int = 0,
    eval_interval: int = 8,
    points: int | None = None,
    time_varying: bool = False,
    car_density: float = 1.0,
    altitude: float | None = None,
    image_format: Literal["png", "jpg"] = "png",
    depth: Literal["none", "png", "npy"] = "none",
    depth_unit: float = 0.01,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    workers: int = 2,
    overwrite: bool = False,
) -> None:
    """Write a capture of a procedural city in COLMAP's layout.

    Args:
        output: Folder to write: images/, sparse/0/ and, if asked for, depth/.
        blocks: Blocks along each side of the city; a block and its road measure 70 m.
        capture: Nadir and oblique views from the air, or views along the roads.
        views: How many views.
        width: Width of a picture, pixels.
        height: Height of a picture, pixels.
        samples: Rays a pixel.
        seed: Of the city and of the course of the cameras.
        eval_interval: Every such view gives no seed points, so that it can be held out (nerfstudio's colmap parser
            holds out every 8th); 0 for none.
        points: Seed points; by default a number that suits the city and the views.
        time_varying: Cars move from view to view; times.txt tells each view's time.
        car_density: 1 for an ordinary day, 0 for no cars.
        altitude: Height of the cameras above the ground, metres; by default what suits the capture.
        image_format: Of the pictures.
        depth: Write depth along the camera's axis too: 16-bit png, or float32 npy in metres.
        depth_unit: Metres of one step of a 16-bit depth; 0.01 reaches 655 m.
        device: Where pictures are rendered; auto takes a GPU if there is one.
        workers: Views rendered side by side; on a CPU each takes one core.
        overwrite: Write into a folder that holds something already.
    """
    import torch

    from ns_multigpu.data import City, CityCapture, write_colmap

    if workers < 1:
        raise ValueError(f"workers is {workers}: give at least 1")
    if depth_unit <= 0:
        raise ValueError(f"depth-unit is {depth_unit} m: give more than 0")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but no CUDA device was found: give cpu or auto")
    where = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    made = CityCapture(
        City(blocks, seed, car_density), capture, views, width, height, samples, seed, eval_interval, time_varying,
        altitude, cache_bytes=0,
    )  # fmt: skip
    write_colmap(
        made, output, points=points, image_format=image_format, depth=depth, depth_unit=depth_unit,
        overwrite=overwrite, device=where, workers=workers, progress=_progress,
    )  # fmt: skip
    print(f"{views} views in {output}: ns-train METHOD colmap --data {output} --colmap-path sparse/0")


def _progress(done: Iterable[int], total: int) -> Iterable[int]:
    from rich.progress import track

    return track(done, description="Rendering views", total=total)


COMMANDS: dict[str, Callable[..., None]] = {"city": city}
"""Subcommands by name."""


def main(args: Sequence[str] | None = None) -> None:
    """Runs a subcommand; what is wrong with its input ends it with a one-line error and exit code 1."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="ns-multigpu", description="Tools of ns_multigpu.", args=args
        )
    except (ValueError, OSError, RuntimeError) as error:
        print(f"ns-multigpu: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
