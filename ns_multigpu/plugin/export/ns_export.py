"""Streaming export for plain `ns-export gaussian-splat`, as in `ns-multigpu export`.

nerfstudio's exporter loads the full model on one device, copies it to the host and writes it number by number. It has
no hook for another implementation. But it creates the pipeline first, and that calls this module before it loads
anything.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.utils.rich_utils import CONSOLE

from ns_multigpu.plugin.export.ply import export_ply, run_checkpoint
from ns_multigpu.plugin.faults.errors import InputError

_SCRIPT = ("nerfstudio", "scripts", "exporter.py")


def stream_for_ns_export() -> None:
    """Write the file and exit, if the command `ns-export gaussian-splat` creates the pipeline.

    It returns if anything else creates the pipeline, including another program that calls nerfstudio's exporter.

    Raises:
        SystemExit: the file has been written, or cannot be; then with the reason.
    """
    asked = _asked()
    if asked is None:
        return
    exporter, config = asked
    box = (exporter.obb_center, exporter.obb_rotation, exporter.obb_scale)
    crop = None if None in box else OrientedBox.from_params(*box)  # as in nerfstudio, which ignores an incomplete box
    output = Path(exporter.output_dir) / exporter.output_filename
    try:
        checkpoint = run_checkpoint(Path(exporter.load_config), getattr(config, "load_step", None))
        kept, total = export_ply(checkpoint, output, overwrite=True, crop=crop, rgb=exporter.ply_color_mode == "rgb")
    except (InputError, OSError) as error:
        raise SystemExit(f"ns-export: {error}") from error
    left_out = f"; left out {total - kept:,} that are transparent or not finite" if kept < total else ""
    CONSOLE.print(f"Wrote {output} ({kept:,} Gaussians of {checkpoint.name}{left_out}).", soft_wrap=True)
    raise SystemExit(0)


def _asked() -> tuple[Any, Any] | None:
    """Return the command's exporter and the run's loaded config; None for any other command."""
    frame: FrameType | None = sys._getframe()
    config: Any = None
    while frame is not None:
        name, caller = frame.f_code.co_name, frame.f_back
        if name == "eval_setup":
            config = frame.f_locals.get("config")
        if name == "main" and _is_the_script(frame) and caller is not None and _is_the_script(caller):
            exporter = frame.f_locals.get("self")
            by_command = caller.f_code.co_name == "entrypoint"
            return (exporter, config) if by_command and type(exporter).__name__ == "ExportGaussianSplat" else None
        frame = caller
    return None


def _is_the_script(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).parts[-3:] == _SCRIPT
