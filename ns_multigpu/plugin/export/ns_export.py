"""Support for plain `ns-export` of Gaussians: it streams `gaussian-splat`, as in `ns-multigpu export`.

nerfstudio's exporter loads the full model on one device, copies it to the host and writes it number by number. It has
no hook for another implementation. But it creates the pipeline first, and that calls this module before it loads
anything.
"""

import shlex
from pathlib import Path

from nerfstudio.utils.rich_utils import CONSOLE

from ns_multigpu.plugin.export.ply import crop_box, export_ply, report, run_checkpoint
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.nerfstudio_commands import running_command

_OF_FIELDS = {
    "ExportPointCloud": "pointcloud", "ExportTSDFMesh": "tsdf", "ExportPoissonMesh": "poisson",
    "ExportMarchingCubesMesh": "marching-cubes",
}  # fmt: skip
"""Exporters of radiance fields, and their commands."""


def stream_for_ns_export() -> None:
    """Write the file and exit, if the command `ns-export gaussian-splat` creates the pipeline. Exit also if another
    `ns-export` does that needs a radiance field.

    It returns if anything else creates the pipeline, including another program that calls nerfstudio's exporter.

    Raises:
        SystemExit: the file has been written, or cannot be; then with the reason.
    """
    exporter, config = running_command("exporter.py") or (None, None)
    if exporter is None:
        return
    kind = type(exporter).__name__
    if kind in _OF_FIELDS:
        run = shlex.quote(str(exporter.load_config))
        raise SystemExit(
            f"ns-export {_OF_FIELDS[kind]}: it is for radiance fields, and this is a run of Gaussians. Give, for a "
            "mesh of their surfaces or for the Gaussians:\n"
            f"  ns-multigpu export-mesh --load-config {run} --output-path mesh.ply\n"
            f"  ns-multigpu export --load-config {run} --output-path splat.ply"
        )
    if kind != "ExportGaussianSplat":
        return
    output = Path(exporter.output_dir) / exporter.output_filename
    try:
        crop = crop_box(exporter.obb_center, exporter.obb_rotation, exporter.obb_scale)
        checkpoint = run_checkpoint(Path(exporter.load_config), getattr(config, "load_step", None))
        kept, total = export_ply(checkpoint, output, overwrite=True, crop=crop, rgb=exporter.ply_color_mode == "rgb")
    except (InputError, OSError) as error:
        raise SystemExit(f"ns-export: {error}") from error
    CONSOLE.print(report(output, checkpoint, kept, total, crop), soft_wrap=True)
    raise SystemExit(0)
