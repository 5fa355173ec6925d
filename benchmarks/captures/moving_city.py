"""4D against 3D Gaussians on the same views of a city whose cars move: quality on held-out views, all of them and where
something moves, and a frame of each.

    python -m benchmarks.captures.moving_city --runs 3dgs=RUN/config.yml 4dgs=RUN/config.yml --output FILE.json

Runs are trained before, by `ns-train ... city --time-varying True --rig N`: the JSON has their options. A pixel counts
as moving where the camera, which stands still, sees it change by more than a tenth of the range.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from nerfstudio.utils.eval_utils import eval_setup
from PIL import Image
from torch import Tensor

from benchmarks.lib.report import write_report
from ns_multigpu.city import CityCapture
from ns_multigpu.plugin.capture.city_dataparser import CAPTURE, VIEWS

MOVES = 0.1
"""Of the range of a colour: the least change of a pixel that counts as moving."""


def moving_pixels(capture: CityCapture, rig: int) -> Tensor:
    """Return the pixels in which each camera sees motion at any time, [rig, height, width] bool."""
    films = [torch.stack([capture.image(v) for v in range(c, len(capture), rig)]).float() / 255 for c in range(rig)]
    return torch.stack([(film.amax(0) - film.amin(0)).amax(-1) > MOVES for film in films])


def psnr(squared: float, count: int) -> float:
    """Return PSNR in dB from a sum of `count` squared errors."""
    return float(-10 * torch.log10(torch.tensor(squared / max(count, 1))))


@torch.no_grad()
def measure(config: Path, shown: int | None, frames: dict[str, Tensor], name: str) -> dict[str, Any]:
    """Return the quality of a run on its held-out views. Puts the view with number `shown` into `frames`."""
    setup: tuple[Any, Any, Path, int] = eval_setup(config, test_mode="test")
    run, pipeline, _, step = setup
    data, parser = pipeline.datamanager, run.pipeline.datamanager.dataparser
    outputs = data.dataparser.get_dataparser_outputs(split="test")
    capture, numbers = outputs.metadata[CAPTURE], outputs.metadata[VIEWS].tolist()
    moves = moving_pixels(capture, parser.rig)
    pipeline.eval()
    sums = {"all": [0.0, 0], "moving": [0.0, 0], "still": [0.0, 0]}
    for place, number in enumerate(numbers):
        image = capture.image(number).float() / 255
        camera = data.eval_dataset.cameras[place : place + 1].to(pipeline.device)
        drawn = pipeline.model.get_outputs_for_camera(camera)["rgb"].cpu()
        error, where = (drawn - image).square(), moves[number % parser.rig]
        for key, mask in (("all", where | True), ("moving", where), ("still", ~where)):
            sums[key][0] += float(error[mask].sum())
            sums[key][1] += int(mask.sum()) * 3
        if place == shown:
            frames["capture"], frames[name] = image, drawn
    model = run.pipeline.model
    return {
        "primitive": model.primitive,
        "points": pipeline.model.num_points,
        "images": step + 1,
        "held_out_views": len(numbers),
        "moving_share": sums["moving"][1] / sums["all"][1],
        **{f"psnr_{key}": round(psnr(*value), 3) for key, value in sums.items()},  # type: ignore[arg-type]
        "options": {
            "sh_degree": model.sh_degree, "max_gaussians": model.max_gaussians, "stop_split_at": model.stop_split_at,
            **{key: getattr(parser, key) for key in ("blocks", "seed", "views", "rig", "width", "height", "altitude")},
            "car_density": parser.car_density, "points": parser.points, "samples": parser.samples,
        },
    }  # fmt: skip


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="+", required=True, metavar="NAME=CONFIG")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--picture", type=Path, help="the capture's frame and that of each run, side by side")
    parser.add_argument("--shown", type=int, default=0, help="which held-out view is in the picture")
    args = parser.parse_args()
    frames: dict[str, Tensor] = {}
    found = {}
    for word in args.runs:
        name, config = word.split("=", 1)
        found[name] = measure(Path(config), args.shown, frames, name)
        print(name, found[name], flush=True)
    write_report(args.output, runs=found)
    if args.picture is not None:
        side_by_side = torch.cat(list(frames.values()), dim=1).clamp(0, 1)
        Image.fromarray((side_by_side * 255).round().byte().numpy()).save(args.picture, quality=92)


if __name__ == "__main__":
    main()
