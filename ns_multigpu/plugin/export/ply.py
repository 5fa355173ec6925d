"""Export of a checkpoint to one PLY file, without holding the full model.

The file is byte for byte that of `ns-export gaussian-splat` (nerfstudio 1.1.5), with default options, RGB colours or a
box. Header, columns and order are the same. Gaussians with a non-finite number or an opacity below 1/255 are omitted.
Points are read in chunks, from a sharded or an ordinary checkpoint, nerfstudio's own included. In the world frame
positions are float64 where float32 cannot hold them.

Two differences remain. ns-export fails if a position is not finite; here only that Gaussian is omitted. Colours of a
model without harmonics pass through a sigmoid, whose last bit in torch depends on the position in the tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ns_multigpu.plugin.export.world_frame import WorldFrame
from ns_multigpu.plugin.faults.errors import InputError, whole_file
from ns_multigpu.plugin.model.cameras import in_box
from ns_multigpu.primitives.gaussians.init import SH_C0
from ns_multigpu.primitives.gaussians.schema import PLY_ORDER
from ns_multigpu.primitives.registry import PRIMITIVES, titled

CHUNK = 1_000_000
"""Points per chunk: with harmonics of degree 3 about 1 GB, more than twice the size written."""

_OPACITY_LIMIT = -5.5373
"""Logit of 1/255 as in ns-export: rasterization skips fainter Gaussians."""

_NORMAL = ("nx", "ny", "nz")
_RGB = ("red", "green", "blue")
_PLAIN = "features_dc"

Numbers = tuple[float, float, float] | None
"""Option of a box."""
Progress = Callable[[Iterable[int], int], Iterable[int]]
"""Progress display: yields the chunks' starts, given their number."""


class PointSource:
    """Points of a checkpoint, read by rows.

    Args:
        path: a .ckpt.
        frame: frame of the file that is written; by default the model's.

    Raises:
        InputError: the file is no checkpoint of Gaussians or damaged, or its shards are missing.
    """

    def __init__(self, path: Path, frame: WorldFrame | None = None) -> None:
        self.frame = frame
        self.position_type = "<f4" if frame is None or not frame.is_far else "<f8"
        pipeline: Mapping[str, Any] = read_checkpoint_file(path)["pipeline"]
        self.kind = kind_in(pipeline)
        schema = PRIMITIVES[self.kind].schema if self.kind in PRIMITIVES else ()
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
                name = name.removeprefix(POINTS).removeprefix("_model.")  # "_model." is an older prefix
                if name in PLY_ORDER:
                    self._tensors[name] = value
            shapes = {name: tuple(value.shape) for name, value in self._tensors.items()}
        if missing := [name for name in PLY_ORDER if name not in shapes]:
            raise InputError(
                f"{path} is not a checkpoint of {PRIMITIVES[self.kind].title}: it has no {', '.join(missing)}."
            )
        self.count = shapes[POSITION][0]
        by_degree = next(one.name for one in self.parameters if HARMONICS in one.shape)
        self.degree = degree_of(shapes[by_degree][1])

    def rows(self, names: Iterable[str], rows: range) -> dict[str, Tensor]:
        """Return rows of parameters, on the CPU."""
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
    frame: WorldFrame | None = None,
) -> tuple[int, int]:
    """Write a checkpoint's points to a PLY file atomically.

    2D Gaussians are written as by the published code: the same columns without `scale_2`.

    Args:
        checkpoint: a .ckpt.
        output: the file to write.
        overwrite: True to replace an existing file.
        chunk: points held at a time.
        progress: called with the starts of the chunks and their number.
        crop: omit points outside this box in the model's frame.
        frame: frame of the file; by default the model's.
        rgb: write view-independent RGB colours instead of harmonics.

    Returns:
        the number of points written, and the total number.

    Raises:
        InputError: the checkpoint is unreadable, the file exists, or no point would be written.
        OSError: the disk rejected the data.
    """
    if output.exists() and not overwrite:
        raise InputError(f"{output} exists already: give another name, or --overwrite.")
    if chunk < 1:
        raise InputError(f"chunk is {chunk}: give how many points to hold at a time, at least 1.")
    source = PointSource(checkpoint, frame)
    with whole_file(output) as part:
        # The header needs the number of points first. Opacities alone, a small part of the data, give it unless other
        # numbers are not finite. Then the header is rewritten, or the whole file if its length changes.
        kept = count_visible(source, crop, chunk)
        while (written := _write(part, source, kept, chunk, progress, crop, rgb)) != kept:
            longer, kept = len(str(written)) != len(str(kept)), written
            if not longer:
                with part.open("r+b") as file:
                    file.write(_header(kept, source, rgb))
                break
        if kept == 0:
            raise nothing_to_write(checkpoint, source.count, crop)
    return kept, source.count


def run_checkpoint(config: Path, step: int | None) -> Path:
    """Return the checkpoint of a run.

    Args:
        config: the run's config.yml. Its checkpoints are in the same folder, or at the path in the config.
        step: of the checkpoint; the newest by default.

    Raises:
        InputError: no checkpoint is found.
    """
    if not config.is_file():
        what = "it is a folder" if config.is_dir() else "there is no such file"
        raise InputError(f"--load-config {config}: {what}. Give the config.yml of a run.")
    models = config.parent / "nerfstudio_models"
    if not checkpoints_in(models):
        settings: Any = None
        with suppress(UnicodeDecodeError, yaml.YAMLError):
            settings = yaml.load(config.read_text("utf8"), Loader=yaml.Loader)  # as nerfstudio's commands do
        if not hasattr(settings, "get_checkpoint_dir"):
            raise InputError(f"--load-config {config}: this is not the config.yml of a run.")
        next_to = config.parent / settings.relative_model_dir
        models = next_to if checkpoints_in(next_to) else settings.get_checkpoint_dir()
    found = {step_of(path): path for path in checkpoints_in(models)}
    if not found:
        raise InputError(f"--load-config {config}: there is no step-*.ckpt in {models}.")
    if step is not None and step not in found:
        raise InputError(f"--step {step}: {models} has no such step; there are {', '.join(map(str, found))}.")
    return found[max(found) if step is None else step]


def crop_box(center: Numbers, rotation: Numbers, scale: Numbers) -> OrientedBox | None:
    """Return the box of the options `--obb-center`, `--obb-rotation` and `--obb-scale`; None if none is given.

    Raises:
        InputError: some are missing, or they describe no box.
    """
    box = (center, rotation, scale)
    if all(part is None for part in box):
        return None
    if center is None or rotation is None or scale is None:
        raise InputError("A box takes all three: --obb-center, --obb-rotation and --obb-scale.")
    if not np.isfinite([*center, *rotation, *scale]).all() or min(scale) <= 0:
        raise InputError(
            f"The box with --obb-center {_words(center)} --obb-rotation {_words(rotation)} --obb-scale {_words(scale)} "
            "holds nothing: give numbers, and sizes above 0."
        )
    if max(map(abs, rotation)) > 2 * np.pi:
        raise InputError(f"--obb-rotation {_words(rotation)}: give radians, at most a turn; 90 degrees are 1.5708.")
    return OrientedBox.from_params(center, rotation, scale)


def _words(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


def report(output: Path, checkpoint: Path, kept: int, total: int, crop: OrientedBox | None) -> str:
    """Return the message about a file that was written: how many points it has, and how many were left out."""
    reason = "transparent or not finite" + ("" if crop is None else ", or outside the box")
    left_out = f"; left out {total - kept:,} that are {reason}" if kept < total else ""
    return f"Wrote {output} ({kept:,} Gaussians of {checkpoint.name}{left_out})."


def nothing_to_write(checkpoint: Path, count: int, crop: OrientedBox | None) -> InputError:
    """Return the error of an export without points."""
    if crop is None:
        return InputError(f"{checkpoint}: none of its {count} Gaussians is finite and opaque: nothing is written.")
    return InputError(
        f"{checkpoint}: the box holds none of its {count} Gaussians that is finite and opaque: nothing is written. The "
        "box is in the model's coordinates, as the viewer's are, and --obb-rotation in radians."
    )


def columns(source: PointSource) -> list[str]:
    """Return the properties of a vertex, in order."""
    position, *others = (one.properties(source.degree) for one in source.parameters)
    return [*position, *_NORMAL, *(name for names in others for name in names)]


def _rgb_type(source: PointSource) -> "np.dtype[Any]":
    """Return the dtype of a vertex with RGB colours."""
    fields: list[tuple[str, str]] = []
    for one in source.parameters:
        if one.name == _PLAIN:
            fields += [(name, "u1") for name in _RGB]
        elif HARMONICS not in one.shape:
            kind = source.position_type if one.name == POSITION else "<f4"
            fields += [(name, kind) for name in one.properties(0)]
        if one.name == POSITION:
            fields += [(name, "<f4") for name in _NORMAL]
    return np.dtype(fields)


def _header(count: int, source: PointSource, rgb: bool = False) -> bytes:
    type_names = {"<f4": "float", "<f8": "double", "|u1": "uchar"}
    kinds = [source.position_type] * 3 + ["<f4"] * (len(columns(source)) - 3)
    fields = _rgb_type(source) if rgb else np.dtype(list(zip(columns(source), kinds, strict=True)))
    properties = [f"property {type_names[fields[name].str]} {name}" for name in fields.names or ()]
    lines = [
        "ply",
        "format binary_little_endian 1.0",
        f"comment Generated by Nerstudio {version('nerfstudio')}",  # nerfstudio's spelling, for identical files
        "comment Vertical Axis: z" if source.frame is None else "comment In the capture's own coordinates",
        f"element vertex {count}",
        *properties,
        "end_header",
    ]
    return "".join(line + "\n" for line in lines).encode()


def chunks_of(count: int, chunk: int) -> Iterator[range]:
    """Yield the row ranges of the chunks."""
    for begin in range(0, count, chunk):
        yield range(begin, min(begin + chunk, count))


def _write(
    path: Path, source: PointSource, expected: int, chunk: int, progress: Progress, crop: OrientedBox | None, rgb: bool
) -> int:
    """Write a header for `expected` points, and all points that are kept; return their number."""
    written = 0
    with path.open("wb") as file:
        file.write(_header(expected, source, rgb))
        total = -(-source.count // chunk)
        for begin in progress(range(0, source.count, chunk), total):
            rows = range(begin, min(begin + chunk, source.count))
            points = source.rows(PLY_ORDER, rows)
            wanted = visible(points, crop).numpy()
            if source.frame is not None:
                points = source.frame.points(points)
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
    if source.position_type == "<f8":
        rows = np.empty(len(table), [("position", "<f8", 3), ("others", "<f4", table.shape[1] - 3)])
        rows["position"], rows["others"] = points[POSITION].numpy()[kept], table[:, 3:]
        table = rows
    file.write(table.data)
    return len(table)


def _write_rgb(file: BinaryIO, points: Mapping[str, Tensor], source: PointSource, wanted: Any) -> int:
    fields = _rgb_type(source)
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
    """Return [n, 3] view-independent colours in [0, 1] from the colour parameter."""
    return (torch.sigmoid(value) if degree == 0 else value * SH_C0 + 0.5).clamp(0.0, 1.0)


def _column(value: Tensor, parameter: Parameter, degree: int) -> Tensor:
    """Return a parameter in the file's layout, [n, numbers]."""
    if parameter.name == _PLAIN and degree == 0:  # Splatfacto without harmonics uses a sigmoid
        return (torch.sigmoid(value) - 0.5) / SH_C0
    if HARMONICS in parameter.shape:
        return value.transpose(1, 2).flatten(1)  # channel-major, as Inria's viewers read them
    return value


def count_visible(source: PointSource, crop: OrientedBox | None, chunk: int = CHUNK) -> int:
    """Return how many points are `visible`."""
    names = ["opacities"] if crop is None else ["opacities", POSITION]
    return sum(int(visible(source.rows(names, rows), crop).sum()) for rows in chunks_of(source.count, chunk))


def visible(points: Mapping[str, Tensor], crop: OrientedBox | None) -> Tensor:
    """Return [n] True if a point's opacity is finite and above the limit, and the point is in the box, if given."""
    opacity = points["opacities"].reshape(-1)
    seen = opacity.isfinite() & (opacity >= _OPACITY_LIMIT)
    return seen if crop is None else seen & in_box(crop, points[POSITION])
