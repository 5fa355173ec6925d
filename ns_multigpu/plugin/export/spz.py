"""Export to .spz, a compressed format of web viewers, by PlayCanvas's splat-transform.

The PLY is streamed from the checkpoint to a temporary file next to the output. The program reads it as a whole.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ns_multigpu.plugin.export.ply import PointSource, export_ply
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.registry import FIRST, titled

PROGRAM = "splat-transform"
_OPTIONS = ("--quiet", "--spz-version", "3")
"""More programs read version 3 than version 4."""


def export_spz(checkpoint: Path, output: Path, *, overwrite: bool = False, **options: Any) -> tuple[int, int]:
    """Write a checkpoint's points to a .spz file atomically.

    Args:
        checkpoint: a .ckpt.
        output: the file to write.
        overwrite: True to replace an existing file.
        options: of `export_ply`.

    Returns:
        the number of points written, and the total number.

    Raises:
        InputError: the program is not installed or fails; or see `export_ply`.
        OSError: the disk rejected the data.
    """
    if output.exists() and not overwrite:
        raise InputError(f"{output} exists already: give another name, or --overwrite.")
    if (kind := PointSource(checkpoint).kind) != FIRST:
        raise InputError(f"{checkpoint} is a checkpoint of {titled(kind)}; .spz files hold {titled(FIRST)}.")
    program = shutil.which(PROGRAM)
    if program is None:
        raise InputError(
            f".spz files are written by {PROGRAM}, which is not on PATH. Install it with Node 18 or newer: "
            "npm install -g @playcanvas/splat-transform"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
        ply, made = Path(folder) / "model.ply", Path(folder) / "model.spz"
        written = export_ply(checkpoint, ply, **options)
        done = subprocess.run([program, *_OPTIONS, ply, made], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise InputError(f"{PROGRAM} ended with status {done.returncode}: {(done.stderr + done.stdout).strip()}")
        made.replace(output)
    return written
