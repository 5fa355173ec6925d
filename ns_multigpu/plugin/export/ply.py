"""A merged PLY of a model, from its checkpoint, without holding the model.

The file is byte for byte what `ns-export gaussian-splat` (nerfstudio 1.1.5) writes with its default options: the same
header, columns and order, without Gaussians that have a number that is not finite or an opacity below 1/255. It reads
the points of one chunk after the other, from a sharded checkpoint or from an ordinary one, nerfstudio's own included.
(Where a position is not finite ns-export writes nothing at all and fails; here only that Gaussian is left out. Colours
of a model without harmonics go through a sigmoid, of which torch rounds the last bit by where in a tensor a number is.)
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import yaml
from torch import Tensor

from ns_multigpu.core.schema import HARMONICS, POSITION, Parameter, degree_of
from ns_multigpu.plugin.checkpoint.sharded_state import POINTS, SavedPoints
from ns_multigpu.plugin.checkpoint.verify import SHARDS, checkpoints_in, read_checkpoint_file, step_of
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.gaussians.init import SH_C0
from ns_multigpu.primitives.gaussians.schema import ORDER, PLY_ORDER, SCHEMA

CHUNK = 1_000_000
"""Points held at a time: with harmonics of degree 3 some 1 GB, twice what is written of them and more."""

_OPACITY_LIMIT = -5.5373
"""The logit of 1/255 as ns-export has it: rasterization skips fainter Gaussians."""

_NORMAL = ("nx", "ny", "nz")
_PARAMETERS = tuple(one for name in PLY_ORDER for one in SCHEMA if one.name == name)
_BY_DEGREE = next(one.name for one in SCHEMA if HARMONICS in one.shape)

Progress = Callable[[Iterable[int], int], Iterable[int]]
"""Shows that so many of a number of chunks are done, while it passes them on."""


class PointSource:
    """The points of a checkpoint, any rows at a time.

    Args:
        path: a .ckpt.

    Raises:
        InputError: it is no checkpoint of Gaussians, or damaged, or its shards are missing.
    """

    def __init__(self, path: Path) -> None:
        pipeline: Mapping[str, Any] = read_checkpoint_file(path)["pipeline"]
        self._shards: SavedPoints | None = None
        self._tensors: dict[str, Tensor] = {}
        if SHARDS in pipeline:
            self._shards = SavedPoints.of(pipeline, path.parent)
            shapes = dict(self._shards.shapes)
        else:
            for key, value in pipeline.items():
                name = key.removeprefix("module.").replace("_model.module.", "_model.", 1)
                name = name.removeprefix(POINTS).removeprefix("_model.")  # the second: as nerfstudio once named them
                if name in ORDER:
                    self._tensors[name] = value
            shapes = {name: tuple(value.shape) for name, value in self._tensors.items()}
        if missing := [name for name in PLY_ORDER if name not in shapes]:
            raise InputError(f"{path} is not a checkpoint of 3D Gaussians: it has no {', '.join(missing)}.")
        self.count = shapes[POSITION][0]
        self.degree = degree_of(shapes[_BY_DEGREE][1])

    def rows(self, names: Iterable[str], rows: range) -> dict[str, Tensor]:
        """Rows of parameters, on the CPU."""
        if self._shards is not None:
            return self._shards.read(list(names), rows)
        return {name: self._tensors[name][rows.start : rows.stop].detach() for name in names}


def export_ply(
    checkpoint: Path,
    output: Path,
    *,
    overwrite: bool = False,
    chunk: int = CHUNK,
    progress: Progress = lambda chunks, total: chunks,
) -> tuple[int, int]:
    """Writes a checkpoint's points to a PLY file, which is there when it is whole.

    Args:
        checkpoint: a .ckpt.
        output: the file to write.
        overwrite: whether it may exist already.
        chunk: points held at a time.
        progress: called with the beginnings of the chunks and their number.

    Returns:
        how many points were written, and how many there are.

    Raises:
        InputError: the checkpoint cannot be read, the file exists, or there is no point to write.
        OSError: the disk would not take it.
    """
    if output.exists() and not overwrite:
        raise InputError(f"{output} exists already: give another name, or --overwrite.")
    if chunk < 1:
        raise InputError(f"chunk is {chunk}: give how many points to hold at a time, at least 1.")
    source = PointSource(checkpoint)
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f"{output.name}.{os.getpid()}.part")
    try:
        # Their number stands before the points. Opacities alone, a small part of what there is to read, give it unless
        # other numbers are not finite; then the header is written again, or everything if it has another length.
        kept = sum(int(_visible(source.rows(["opacities"], rows)).sum()) for rows in _chunks(source.count, chunk))
        while (written := _write(part, source, kept, chunk, progress)) != kept:
            longer, kept = len(str(written)) != len(str(kept)), written
            if not longer:
                with part.open("r+b") as file:
                    file.write(_header(kept, source.degree))
                break
        if kept == 0:
            raise InputError(
                f"{checkpoint}: none of its {source.count} Gaussians is finite and opaque: no PLY written."
            )
        part.replace(output)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
    return kept, source.count


def run_checkpoint(config: Path, step: int | None) -> Path:
    """The checkpoint of a run.

    Args:
        config: the run's config.yml. Its checkpoints lie beside it, or else where it says.
        step: which one; the newest by default.

    Raises:
        InputError: there is none.
    """
    if not config.is_file():
        raise InputError(f"--load-config {config}: there is no such file. Give the config.yml of a run.")
    models = config.parent / "nerfstudio_models"
    if not checkpoints_in(models):
        settings = yaml.load(config.read_text(), Loader=yaml.Loader)  # as nerfstudio's commands do
        if not hasattr(settings, "get_checkpoint_dir"):
            raise InputError(f"--load-config {config}: this is not the config.yml of a run.")
        beside = config.parent / settings.relative_model_dir
        models = beside if checkpoints_in(beside) else settings.get_checkpoint_dir()
    found = {step_of(path): path for path in checkpoints_in(models)}
    if not found:
        raise InputError(f"--load-config {config}: there is no step-*.ckpt in {models}.")
    if step is not None and step not in found:
        raise InputError(f"--step {step}: {models} has no such step; there are {', '.join(map(str, found))}.")
    return found[max(found) if step is None else step]


def columns(degree: int) -> list[str]:
    """The properties of a vertex, in order, of a model with harmonics of this degree."""
    position, *others = (one.properties(degree) for one in _PARAMETERS)
    return [*position, *_NORMAL, *(name for names in others for name in names)]


def _header(count: int, degree: int) -> bytes:
    lines = [
        "ply",
        "format binary_little_endian 1.0",
        f"comment Generated by Nerstudio {version('nerfstudio')}",  # spelt as there: the files are to be the same
        "comment Vertical Axis: z",
        f"element vertex {count}",
        *(f"property float {name}" for name in columns(degree)),
        "end_header",
    ]
    return "".join(line + "\n" for line in lines).encode()


def _chunks(count: int, chunk: int) -> Iterator[range]:
    for begin in range(0, count, chunk):
        yield range(begin, min(begin + chunk, count))


def _write(path: Path, source: PointSource, expected: int, chunk: int, progress: Progress) -> int:
    """Writes a header for `expected` points, and all that are kept; returns how many."""
    written = 0
    with path.open("wb") as file:
        file.write(_header(expected, source.degree))
        total = -(-source.count // chunk)
        for begin in progress(range(0, source.count, chunk), total):
            rows = range(begin, min(begin + chunk, source.count))
            written += _write_rows(file, source.rows(ORDER, rows), source.degree)
    return written


def _write_rows(file: BinaryIO, points: Mapping[str, Tensor], degree: int) -> int:
    count = len(points[POSITION])
    parts = [_column(points[one.name], one, degree) for one in _PARAMETERS]
    parts.insert(1, torch.zeros(count, len(_NORMAL)))
    table = np.empty((count, len(columns(degree))), dtype="<f4")
    at = 0
    for value in parts:
        width = value.shape[1]
        table[:, at : at + width] = value.numpy()
        at += width
    kept = _visible(points).numpy() & np.isfinite(table).all(axis=1)
    if not kept.all():
        table = table[kept]
    file.write(table.data)
    return len(table)


def _column(value: Tensor, parameter: Parameter, degree: int) -> Tensor:
    """A parameter as it stands in the file, [n, numbers]."""
    if parameter.name == "features_dc" and degree == 0:  # Splatfacto without harmonics learns colours through a sigmoid
        return (torch.sigmoid(value) - 0.5) / SH_C0
    if HARMONICS in parameter.shape:
        return value.transpose(1, 2).flatten(1)  # channel by channel, as Inria's viewers read them
    return value


def _visible(points: Mapping[str, Tensor]) -> Tensor:
    """[n] whether a point's opacity is a number and not below the limit."""
    opacity = points["opacities"].reshape(-1)
    return opacity.isfinite() & (opacity >= _OPACITY_LIMIT)
