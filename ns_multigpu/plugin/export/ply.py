"""A merged PLY of a model, from its checkpoint, without holding the model.

The file is byte for byte what `ns-export gaussian-splat` (nerfstudio 1.1.5) writes, with its default options or with
RGB colours or a box: the same header, columns and order, without Gaussians that have a number that is not finite or an
opacity below 1/255. It reads the points of one chunk after the other, from a sharded checkpoint or from an ordinary
one, nerfstudio's own included.
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
from nerfstudio.data.scene_box import OrientedBox
from torch import Tensor

from ns_multigpu.core.schema import HARMONICS, POSITION, Parameter, degree_of
from ns_multigpu.plugin.checkpoint.objective_kind import kind_in
from ns_multigpu.plugin.checkpoint.sharded_state import POINTS, SavedPoints
from ns_multigpu.plugin.checkpoint.verify import SHARDS, checkpoints_in, read_checkpoint_file, step_of
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.gaussians.init import SH_C0
from ns_multigpu.primitives.gaussians.schema import PLY_ORDER
from ns_multigpu.primitives.registry import KINDS, titled

CHUNK = 1_000_000
"""Points held at a time: with harmonics of degree 3 some 1 GB, twice what is written of them and more."""

_OPACITY_LIMIT = -5.5373
"""The logit of 1/255 as ns-export has it: rasterization skips fainter Gaussians."""

_NORMAL = ("nx", "ny", "nz")
_RGB = ("red", "green", "blue")
_PLAIN = "features_dc"

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
        self.kind = kind_in(pipeline)
        schema = KINDS[self.kind].schema if self.kind in KINDS else ()
        self.parameters = tuple(one for name in PLY_ORDER for one in schema if one.name == name and one.ply)
        if len(self.parameters) != len(PLY_ORDER) or len(schema) != len(PLY_ORDER):
            raise InputError(
                f"{path} is a checkpoint of {titled(self.kind)}, which have no place in PLY and .splat files."
            )
        self._shards: SavedPoints | None = None
        self._tensors: dict[str, Tensor] = {}
        if SHARDS in pipeline:
            self._shards = SavedPoints.of(pipeline, path.parent)
            shapes = dict(self._shards.shapes)
        else:
            for key, value in pipeline.items():
                name = key.removeprefix("module.").replace("_model.module.", "_model.", 1)
                name = name.removeprefix(POINTS).removeprefix("_model.")  # the second: as nerfstudio once named them
                if name in PLY_ORDER:
                    self._tensors[name] = value
            shapes = {name: tuple(value.shape) for name, value in self._tensors.items()}
        if missing := [name for name in PLY_ORDER if name not in shapes]:
            raise InputError(f"{path} is not a checkpoint of {KINDS[self.kind].title}: it has no {', '.join(missing)}.")
        self.count = shapes[POSITION][0]
        by_degree = next(one.name for one in self.parameters if HARMONICS in one.shape)
        self.degree = degree_of(shapes[by_degree][1])

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
    crop: OrientedBox | None = None,
    rgb: bool = False,
) -> tuple[int, int]:
    """Writes a checkpoint's points to a PLY file, which is there when it is whole. Of 2D Gaussians, as the published
    code writes them: the same columns without `scale_2`.

    Args:
        checkpoint: a .ckpt.
        output: the file to write.
        overwrite: whether it may exist already.
        chunk: points held at a time.
        progress: called with the beginnings of the chunks and their number.
        crop: leaves out what is not in this box.
        rgb: colours as red, green and blue, seen from nowhere in particular, instead of harmonics.

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
        looked_at = ["opacities"] if crop is None else ["opacities", POSITION]
        chunks = chunks_of(source.count, chunk)
        kept = sum(int(visible(source.rows(looked_at, rows), crop).sum()) for rows in chunks)
        while (written := _write(part, source, kept, chunk, progress, crop, rgb)) != kept:
            longer, kept = len(str(written)) != len(str(kept)), written
            if not longer:
                with part.open("r+b") as file:
                    file.write(_header(kept, source, rgb))
                break
        if kept == 0:
            raise nothing_to_write(checkpoint, source.count, crop)
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


def nothing_to_write(checkpoint: Path, count: int, crop: OrientedBox | None) -> InputError:
    """The error of an export that would be empty."""
    where = "" if crop is None else " and in the box"
    return InputError(f"{checkpoint}: none of its {count} Gaussians is finite and opaque{where}: nothing is written.")


def columns(source: PointSource) -> list[str]:
    """The properties of a vertex, in order."""
    position, *others = (one.properties(source.degree) for one in source.parameters)
    return [*position, *_NORMAL, *(name for names in others for name in names)]


def _rgb_type(parameters: Iterable[Parameter]) -> "np.dtype[Any]":
    """A vertex with plain colours."""
    fields: list[tuple[str, str]] = []
    for one in parameters:
        if one.name == _PLAIN:
            fields += [(name, "u1") for name in _RGB]
        elif HARMONICS not in one.shape:
            fields += [(name, "<f4") for name in one.properties(0)]
        if one.name == POSITION:
            fields += [(name, "<f4") for name in _NORMAL]
    return np.dtype(fields)


def _header(count: int, source: PointSource, rgb: bool = False) -> bytes:
    kinds = {"<f4": "float", "|u1": "uchar"}
    properties = [f"property float {name}" for name in columns(source)]
    if rgb:
        fields = _rgb_type(source.parameters)
        properties = [f"property {kinds[fields[name].str]} {name}" for name in fields.names or ()]
    lines = [
        "ply",
        "format binary_little_endian 1.0",
        f"comment Generated by Nerstudio {version('nerfstudio')}",  # spelt as there: the files are to be the same
        "comment Vertical Axis: z",
        f"element vertex {count}",
        *properties,
        "end_header",
    ]
    return "".join(line + "\n" for line in lines).encode()


def chunks_of(count: int, chunk: int) -> Iterator[range]:
    """The rows of so many points, some at a time."""
    for begin in range(0, count, chunk):
        yield range(begin, min(begin + chunk, count))


def _write(
    path: Path, source: PointSource, expected: int, chunk: int, progress: Progress, crop: OrientedBox | None, rgb: bool
) -> int:
    """Writes a header for `expected` points, and all that are kept; returns how many."""
    written = 0
    with path.open("wb") as file:
        file.write(_header(expected, source, rgb))
        total = -(-source.count // chunk)
        for begin in progress(range(0, source.count, chunk), total):
            rows = range(begin, min(begin + chunk, source.count))
            points = source.rows(PLY_ORDER, rows)
            wanted = visible(points, crop).numpy()
            written += _write_rgb(file, points, source, wanted) if rgb else _write_rows(file, points, source, wanted)
    return written


def _write_rows(file: BinaryIO, points: Mapping[str, Tensor], source: PointSource, wanted: Any) -> int:
    count = len(points[POSITION])
    parts = [_column(points[one.name], one, source.degree) for one in source.parameters]
    parts.insert(1, torch.zeros(count, len(_NORMAL)))
    table = np.empty((count, len(columns(source))), dtype="<f4")
    at = 0
    for value in parts:
        width = value.shape[1]
        table[:, at : at + width] = value.numpy()
        at += width
    kept = wanted & np.isfinite(table).all(axis=1)
    if not kept.all():
        table = table[kept]
    file.write(table.data)
    return len(table)


def _write_rgb(file: BinaryIO, points: Mapping[str, Tensor], source: PointSource, wanted: Any) -> int:
    fields = _rgb_type(source.parameters)
    table = np.zeros(len(points[POSITION]), dtype=fields)
    kept = wanted.copy()
    for one in source.parameters:
        value = points[one.name]
        if one.name == _PLAIN:
            colors = plain_colors(value, source.degree)
            kept &= np.isfinite(colors.numpy()).all(axis=1)
            for name, channel in zip(_RGB, (colors.nan_to_num() * 255).to(torch.uint8).unbind(1), strict=True):
                table[name] = channel.numpy()
        elif HARMONICS not in one.shape:
            for name, column in zip(
                one.properties(source.degree), value.reshape(len(value), -1).unbind(1), strict=True
            ):
                table[name] = column.numpy()
                kept &= np.isfinite(table[name])
    file.write(table[kept].data)
    return int(kept.sum())


def plain_colors(value: Tensor, degree: int) -> Tensor:
    """[n, 3] colours in [0, 1] seen from nowhere in particular, of the parameter that they are in."""
    return (torch.sigmoid(value) if degree == 0 else value * SH_C0 + 0.5).clamp(0.0, 1.0)


def _column(value: Tensor, parameter: Parameter, degree: int) -> Tensor:
    """A parameter as it stands in the file, [n, numbers]."""
    if parameter.name == _PLAIN and degree == 0:  # Splatfacto without harmonics learns colours through a sigmoid
        return (torch.sigmoid(value) - 0.5) / SH_C0
    if HARMONICS in parameter.shape:
        return value.transpose(1, 2).flatten(1)  # channel by channel, as Inria's viewers read them
    return value


def visible(points: Mapping[str, Tensor], crop: OrientedBox | None) -> Tensor:
    """[n] whether a point's opacity is a number and not below the limit, and it lies in the box, if there is one."""
    opacity = points["opacities"].reshape(-1)
    seen = opacity.isfinite() & (opacity >= _OPACITY_LIMIT)
    return seen if crop is None else seen & crop.within(points[POSITION]).reshape(-1)
