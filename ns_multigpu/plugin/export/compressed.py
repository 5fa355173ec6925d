"""Export to compressed formats of web viewers by PlayCanvas's splat-transform: .spz, SOG, and SOG's levels of detail.

The PLY is streamed from the checkpoint to a temporary file next to the output. The program reads it as a whole.
"""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from nerfstudio.data.scene_box import OrientedBox

from ns_multigpu.plugin.export.ply import PointSource, count_visible, export_ply
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.registry import FIRST, titled

PROGRAM = "splat-transform"
LEVELS = "lod-meta.json"
"""Name of the index of levels of detail. Their files lie next to it."""
NUM_LEVELS = 3
_INSTALL = "npm install -g @playcanvas/splat-transform"
_OLDEST = 3
"""Oldest version of the program. Version 2 writes .spz files with other axes: y and z are reversed."""
_SHARE = "25%"
"""Share of a level's Gaussians that the next level has."""
_MAX_SPZ = 7_000_000
"""Gaussians of degree 3 that the program writes as .spz. With 8 million its encoder aborts."""
_MAX_SOG_ON_CPU = 20_000
"""Gaussians whose palette of harmonics takes minutes on a CPU. The time grows with the square of their number."""


def export_compressed(
    checkpoint: Path,
    output: Path,
    *,
    overwrite: bool = False,
    crop: OrientedBox | None = None,
    rgb: bool = False,
    **options: Any,
) -> tuple[int, int]:
    """Write a checkpoint's points to a .spz or .sog file, or to a folder of levels of detail, atomically.

    Args:
        checkpoint: a .ckpt.
        output: the file to write; for levels, `LEVELS` in a folder that is new or empty.
        overwrite: True to replace an existing file.
        crop: omit points outside this box in the model's frame.
        rgb: write no harmonics.
        options: of `export_ply`.

    Returns:
        the number of points written, and the total number.

    Raises:
        InputError: the program is not installed or fails, or needs a GPU; or see `export_ply`.
        OSError: the disk rejected the data.
    """
    output, has_levels = output.absolute(), output.name == LEVELS
    target = output.parent if has_levels else output
    if has_levels and target.exists() and any(target.iterdir()):
        raise InputError(f"{target} is not empty: levels of detail are many files. Give the name of a new folder.")
    if not has_levels and target.exists() and not overwrite:
        raise InputError(f"{target} exists already: give another name, or --overwrite.")
    source = PointSource(checkpoint)
    if source.kind != FIRST:
        raise InputError(f"{checkpoint} is a checkpoint of {titled(source.kind)}; {target.name} holds {titled(FIRST)}.")
    if shutil.which(PROGRAM) is None:
        raise InputError(
            f"{output.name} is written by {PROGRAM}, which is not on PATH. Install it with Node 22 or newer: {_INSTALL}"
        )
    version = _run("--version")
    if (found := re.search(r"v(\d+)\.", version)) is None or int(found[1]) < _OLDEST:
        raise InputError(f"{version} is not version {_OLDEST} or newer: {_INSTALL}@latest")
    words = ["--quiet", *_options(output.suffix == ".spz", source, crop, rgb)]
    actions = ["--filter-harmonics", 0] if rgb else []
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        levels = [Path(folder) / f"{level}.ply" for level in range(NUM_LEVELS if has_levels else 1)]
        made, inputs = Path(folder) / "made" / output.name, []
        made.parent.mkdir()
        written = export_ply(checkpoint, levels[0], crop=crop, **options)
        for level, ply in enumerate(levels):
            if level > 0:
                _run(*words, levels[level - 1], "--decimate", _SHARE, ply)
            inputs += [ply, *actions, *(["-l", level] if has_levels else [])]
        _run(*words, *inputs, made)
        (made.parent if has_levels else made).replace(target)
    return written


def _run(*words: Any) -> str:
    """Run the program and return what it says."""
    done = subprocess.run([PROGRAM, *map(str, words)], capture_output=True, text=True, check=False)
    said = (done.stderr + done.stdout).strip()
    if done.returncode != 0:
        raise InputError(f"{PROGRAM} ended with status {done.returncode}, as without enough memory, or: {said}")
    return said


def _options(is_spz: bool, source: PointSource, crop: OrientedBox | None, rgb: bool) -> list[str]:
    """Return the program's options for a format on this machine. Raise InputError if harmonics are too many for it."""
    limit, words, reason = _MAX_SPZ, ["--spz-version", "3"], f"do not fit into {PROGRAM}'s memory"  # 3: widest read
    if not is_spz:
        if "No GPU adapters" not in _run("--list-gpus"):
            return []
        limit, words, reason = _MAX_SOG_ON_CPU, ["--gpu", "cpu"], "take hours without a GPU that Vulkan finds"
    if source.degree > 0 and not rgb and count_visible(source, crop) > limit:
        raise InputError(
            f"Harmonics of more than {limit:,} Gaussians {reason}. Leave them out (--color rgb), export a box, or give "
            f"the name of a {'.sog' if is_spz else '.spz'} file."
        )
    return words
