"""Checks of a capture's images before they are decoded, and their shapes."""

from collections.abc import Sequence
from pathlib import Path

import torch
from nerfstudio.data.datasets.base_dataset import InputDataset

from ns_multigpu.core.dist.collectives import broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import (
    DIFFERENT,
    camera_problems,
    different_captures,
    list_problems,
    raise_together,
)
from ns_multigpu.plugin.capture.image_files import Header, read_headers
from ns_multigpu.plugin.capture.image_reading import FileDataset, ImageReader, ImageType
from ns_multigpu.plugin.capture.image_store import ImageShape, shape_of

FAULTS = "Cannot train with this capture (problems: {count}):"
"""Headline of the list of a capture's problems."""


def reads_files(dataset: InputDataset) -> bool:
    """Return True if a dataset's images are the files that it names, not rendered for example."""
    return type(dataset).get_numpy_image in (InputDataset.get_numpy_image, FileDataset.get_numpy_image)


def refuse_different(datasets: Sequence[InputDataset], world: World) -> None:
    """Raise unless all ranks have read the same capture. Every rank calls it.

    Args:
        datasets: the splits, before lens distortion is taken out.

    Raises:
        InputError: on every rank, with the differences.
    """
    lines: list[str] = []
    for dataset in datasets:
        sizes = [_bytes(path) for path in dataset.image_filenames] if reads_files(dataset) else None
        # Folders may have other names on other machines.
        lines += different_captures(dataset.cameras, [path.name for path in dataset.image_filenames], world, sizes)
    raise_together(lines, world, DIFFERENT)


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the rank that reads the file reports it
        return -1


def capture_problems(datasets: Sequence[InputDataset], *, undistort: bool) -> list[str]:
    """Check cameras and lists of files; return the problems, a line each.

    Args:
        datasets: the splits, before lens distortion is taken out. undistort: True if it will be.
    """
    lines: list[str] = []
    for dataset in datasets:
        names = [str(path) for path in dataset.image_filenames]
        lines += camera_problems(dataset.cameras, names, undistort=undistort)
        if reads_files(dataset) and len(names) == len(dataset.cameras):
            masks = dataset._dataparser_outputs.mask_filenames  # pyright: ignore[reportPrivateUsage]
            lines += list_problems(dataset.image_filenames, dataset.cameras, masks)
    return lines


def file_headers(dataset: InputDataset, world: World) -> list[Header] | None:
    """Read the headers of a dataset's files, before lens distortion is removed; None if it reads no files.

    Every rank calls it.
    """
    if not reads_files(dataset) or len(dataset.image_filenames) != len(dataset.cameras):
        return None
    sizes = torch.cat([dataset.cameras.width, dataset.cameras.height], dim=-1).tolist()
    return read_headers(dataset, [(int(w), int(h)) for w, h in sizes], world)


def image_shapes(
    dataset: InputDataset, reader: ImageReader, headers: Sequence[Header] | None, kind: ImageType, world: World
) -> list[ImageShape]:
    """Return the shapes of a dataset's undistorted images, the same on every rank. Every rank calls it.

    Shapes follow from the files' headers. For a dataset that renders its images, the first image is rendered, and the
    others are assumed to have its channels and dtype, in their cameras' sizes.

    Raises:
        InputError: on every rank, naming each file that is missing, truncated, unreadable, or unlike its camera.
    """
    cameras = reader.cameras
    dtype = torch.uint8 if kind == "uint8" else torch.float32
    sizes = torch.cat([cameras.height, cameras.width], dim=-1).tolist()
    if headers is None:
        first = broadcast_object(shape_of(reader.read(0)) if world.is_main and len(dataset) else None, 0, world)
        return [ImageShape(int(h), int(w), first.channels, first.dtype, first.masks) for h, w in sizes]
    raise_together([line for header in headers for line in header.problems], world, FAULTS)
    opaque = dataset._dataparser_outputs.alpha_color is not None  # pyright: ignore[reportPrivateUsage]
    return [
        ImageShape(int(h), int(w), 3 if opaque else header.channels, dtype, reader.masks(index))
        for index, (header, (h, w)) in enumerate(zip(headers, sizes, strict=True))
    ]
