"""Dataparser run on every rank, without prompts; errors of one rank are raised on all of them."""

import dataclasses
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.data.dataparsers.base_dataparser import DataParserConfig
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParser, ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import raise_together, transforms_problems
from ns_multigpu.plugin.capture.colmap import point_count
from ns_multigpu.plugin.capture.coordinate_offset import Offset
from ns_multigpu.plugin.capture.first_look import colmap_problems
from ns_multigpu.plugin.capture.image_files import file_problem
from ns_multigpu.plugin.capture.moved import look_where_it_is
from ns_multigpu.plugin.capture.ply import read_ply
from ns_multigpu.plugin.capture.quick_colmap import QuickColmap
from ns_multigpu.plugin.capture.reading import FAULTS
from ns_multigpu.plugin.capture.seed_points import merged
from ns_multigpu.plugin.capture.split_lists import ListedNerfstudio


@contextmanager
def parsed_together(config: Any, world: World, trains: bool) -> Iterator[None]:
    """Wrap the code in which a datamanager reads its capture; it must contain no collectives. Every rank enters it.

    Args:
        config: the datamanager's. Its dataparser is replaced by one without prompts.
        world: the ranks.
        trains: True for a training run. An opened run may have a capture that was moved.

    Raises:
        InputError: on every rank, if the capture is unreadable on one of them.
    """
    if trains:
        raise_together(_wrong_before_reading(config) if world.is_main else [], world, FAULTS)
    else:
        look_where_it_is(config)
    problems: list[str] = []
    config.dataparser = _unasked(config)
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, NotImplementedError)) and not by_a_dataparser(error):
            raise
        problems = unreadable(config.dataparser, error)
    raise_together(problems, world, FAULTS)


def _wrong_before_reading(config: Any) -> list[str]:
    """Check the files that a dataparser will read; its own errors would not name the files."""
    parser = config.dataparser
    if config.data is not None:
        parser = dataclasses.replace(parser, data=Path(config.data))
    if isinstance(parser, NerfstudioDataParserConfig):
        return transforms_problems(parser.data)
    if isinstance(parser, ColmapDataParserConfig) and parser.data.is_dir():
        return colmap_problems(parser)[0]
    return []


class _UnaskedNerfstudio(ListedNerfstudio):
    """nerfstudio's parser without prompts, as workers have no terminal, and without open3d. Without a ply_file_path it
    returns no seed points; the pipeline reports that. Points at one position are merged.
    """

    prompted_user = True
    create_pc = False

    def _load_3D_points(
        self, ply_file_path: Path, transform_matrix: Tensor, scale_factor: float
    ) -> dict[str, Tensor] | None:
        if not ply_file_path.exists():  # an opened run needs none; training refuses it in the first look
            return None
        positions, colours = read_ply(ply_file_path)
        xyz = torch.from_numpy((positions - self.offset).astype(np.float32))
        xyz = torch.cat((xyz, torch.ones_like(xyz[:, :1])), -1) @ transform_matrix.T * scale_factor
        return merged({"points3D_xyz": xyz, "points3D_rgb": torch.from_numpy(colours)}) if len(xyz) else None


def _unasked(config: Any) -> Any:
    """Return the dataparser's configuration without prompts and with the datamanager's offset. COLMAP's points are
    read fast, and not at all if it has none.
    """
    parser, offset = config.dataparser, getattr(config, "offset", None)
    if type(parser) is NerfstudioDataParserConfig:
        return dataclasses.replace(parser, _target=_with_offset(_UnaskedNerfstudio, offset))
    if isinstance(parser, ColmapDataParserConfig):
        none = point_count(Path(config.data or parser.data) / parser.colmap_path) == 0
        quick: Any = {"_target": _with_offset(QuickColmap, offset)} if parser._target is ColmapDataParser else {}
        return dataclasses.replace(parser, load_3D_points=parser.load_3D_points and not none, **quick)
    return parser


def _with_offset(parser: Any, offset: Offset | None) -> Any:
    return parser if offset is None else partial(parser, offset=offset)


def by_a_dataparser(error: Exception) -> bool:
    """Return True if the error was raised by a dataparser; then its message concerns the capture."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("dataparsers" in Path(frame.filename).parts for frame in frames)


def unreadable(config: DataParserConfig, error: Exception) -> list[str]:
    """Return the problems of a capture that its dataparser cannot read.

    A dataparser stops at the first image that it opens to choose a downscale factor. With a given factor it opens none.
    It is run again with one, and every image is checked, so all missing or damaged files are listed.
    """
    lines = [f"{getattr(config, 'data', '')}: {type(error).__name__}: {error}"]
    if not isinstance(error, OSError) or getattr(config, "downscale_factor", 1) is not None:
        return lines
    try:
        parser = dataclasses.replace(config, downscale_factor=1).setup()  # pyright: ignore[reportCallIssue]
        outputs = [parser.get_dataparser_outputs(split) for split in ("train", "val")]
    except Exception:  # report the first error
        return lines
    files: dict[Path, None] = {}
    for part in outputs:
        files.update(dict.fromkeys([*part.image_filenames, *(part.mask_filenames or [])]))
    found = [problem for problem in map(file_problem, files) if problem is not None]
    return found or lines
