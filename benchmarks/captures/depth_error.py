"""Depth error of trained models at keypoints of held-out views, and their PSNR.

    python -m benchmarks.captures.depth_error --runs without=RUN/config.yml with=RUN/config.yml --output FILE.json

Keypoints are COLMAP's points; with --maps pixels of the held-out views' depth maps, which must be metric.

Runs are trained before, by `ns-train`, with and without `--pipeline.model.depth-loss`. An error is |1/depth drawn -
1/depth of the point| times the scene's size, as in that loss, which has not seen these views.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from nerfstudio.utils.eval_utils import eval_setup
from rich.console import Console
from torch import Tensor

from benchmarks.lib.report import empty_table, write_report
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.depth_loss import disparities_at, keypoints
from ns_multigpu.core.types import Patch, Pixels, View
from ns_multigpu.plugin.capture.device_observations import DeviceObservations
from ns_multigpu.plugin.capture.tracks import read_tracks, scene_scale
from ns_multigpu.plugin.model.cameras import view_from_camera
from ns_multigpu.plugin.render.service import RenderRequest
from ns_multigpu.plugin.splats.depth_maps import read_maps


def errors_of(depth: Tensor, covered: Tensor, view: View, scale: float) -> Tensor:
    """Return the errors at a view's keypoints, [keypoints].

    Args:
        depth, covered: [h, w, 1] of the whole view; where nothing is covered the disparity is 0.
        view: with observations. scale: the scene's size, world units.
    """
    pixels = Pixels(Patch.whole(0, view), depth, covered, torch.where(covered > 0, depth, 0.0))
    places, depths, inside = keypoints(view)
    return scale * (disparities_at(pixels, view, places) - 1 / depths).abs()[inside]


@torch.no_grad()
def measure(config: Path, maps: bool = False, median: bool = False) -> dict[str, Any]:
    """Return PSNR and errors of a run on its held-out views, against COLMAP's points or depth maps.

    Args:
        median: True for errors of the median depth, which the model must have.
    """
    setup: tuple[Any, Any, Path, int] = eval_setup(config, test_mode="test")
    run, pipeline, _, step = setup
    data, model = pipeline.datamanager, pipeline.model
    pipeline.eval()
    held_out = data.dataparser.get_dataparser_outputs(split="test")
    tracks = read_maps(held_out, "metric", World.single()) if maps else read_tracks(data.dataparser_config, held_out)
    observed = DeviceObservations("observations", tracks, 1, torch.device(pipeline.device))
    scale = scene_scale(data.train_dataset.cameras.camera_to_worlds.double().numpy())
    errors: list[Tensor] = []
    psnr: list[float] = []
    for place, (camera, image) in enumerate(data.fixed_indices_eval_dataloader):
        outputs = model.get_outputs_for_camera(camera)
        metrics, _ = model.get_image_metrics_and_images(outputs, image)
        psnr.append(metrics["psnr"])
        (view,) = observed.given([view_from_camera(camera, camera.camera_to_worlds[0], place)])
        drawn = pipeline.renders.pictures.surface(RenderRequest.of(camera), (0,), median=median)
        errors.append(errors_of(drawn.depth, drawn.alpha, view, scale).cpu())
    found = torch.cat(errors)
    options = run.pipeline.model
    of_splats = {
        "primitive": options.primitive,
        "depth_maps": options.depth_maps if held_out.metadata.get("depth_filenames") else "none",
        "images": (step + 1) * run.pipeline.batch(1),
        "points": model.num_points,
    } if run.pipeline.has_splats else {}  # fmt: skip
    return {
        **of_splats,
        "depth_loss": options.depth_loss,
        "depth": "median" if median else "expected",
        "errors_at": "pixels of maps" if maps else "COLMAP's points",
        "seed": run.machine.seed,
        "steps": step + 1,
        "held_out_views": len(psnr),
        "keypoints": len(found),
        "psnr": round(sum(psnr) / len(psnr), 3),
        "disparity_error_mean": round(float(found.mean()), 5),
        "disparity_error_median": round(float(found.median()), 5),
    }


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, metavar="NAME=CONFIG")
    parser.add_argument("--maps", action="store_true")
    parser.add_argument("--median", action="store_true", help="errors of the median depth, not the expected one")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    runs = (word.split("=", 1) for word in args.runs)
    found = {name: measure(Path(config), args.maps, args.median) for name, config in runs}
    shown = ("psnr", "disparity_error_mean", "disparity_error_median", "steps")
    table = empty_table(None, ("run", *shown))
    for name, row in found.items():
        table.add_row(name, *(str(row[key]) for key in shown))
    Console().print(table)
    write_report(args.output, runs=found)


if __name__ == "__main__":
    main()
