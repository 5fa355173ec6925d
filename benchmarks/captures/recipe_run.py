"""One run of `benchmarks.captures.recipes`: a process of its own that trains, takes the scores and writes them down.

It is forked from a server that has imported all this module imports, so that a run of seconds does not wait for
imports as long again.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import tyro
from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion
from nerfstudio.scripts.train import _set_random_seed

from benchmarks.captures import splat_city, splatfacto_baseline
from benchmarks.captures.splatfacto_baseline import correct_few, draw_view, peak_mib
from ns_multigpu.city import City, CityCapture, write_colmap
from ns_multigpu.plugin.run import trainer as _imported_for_the_runs  # noqa: F401


def begin(log: Path) -> None:
    """Redirect this process's output to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)


def train_ours(words: Sequence[str], log: Path, output: Path, picture: Path | None = None) -> None:
    """Train as `ns-train` does with these words, evaluate all held-out views and write the scores to `output` as JSON.

    Args:
        picture: the PNG to write of the middle held-out view; see `draw_view`.
    """
    begin(log)
    sys.argv = ["ns-train", *words]  # it is looked at for what was given
    config: Any = tyro.cli(AnnotatedBaseConfigUnion, args=list(words))
    config.set_timestamp()
    config.print_to_terminal()
    config.save_config()
    config.viewer.quit_on_train_completion = True
    _set_random_seed(config.machine.seed)
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    trainer.train()
    peak = peak_mib() if torch.cuda.is_available() else None
    start = time.perf_counter()
    correct_few(trainer.pipeline)
    scores = trainer.pipeline.get_average_eval_image_metrics()
    seconds = trainer.progress.seconds
    if picture is not None:
        draw_view(trainer.pipeline, picture)
    result = {
        "psnr": scores["psnr"],
        "cc_psnr": scores.get("cc_psnr"),
        "ssim": scores["ssim"],
        "train_seconds": seconds,
        "images_per_s": config.max_num_images / seconds,
        "gaussians": trainer.pipeline.model.total_points,
        "peak_mib": peak,
        "eval_seconds": time.perf_counter() - start,
    }
    output.write_text(json.dumps(result))


def train_splatfacto(words: Sequence[str], log: Path, output: Path, picture: Path | None = None) -> None:
    """Train nerfstudio's own method with words of `splatfacto_baseline`, which writes `result.json` itself."""
    begin(log)
    shown = [] if picture is None else ["--picture", str(picture)]
    sys.argv = ["splatfacto_baseline", *shown, *words]
    splatfacto_baseline.main()
    (Path(output.parent) / "result.json").replace(output)


def make_city(kind: Any, seed: int, folder: Path, size: tuple[int, int, int, int], device: str, log: Path) -> None:
    """Write a city's capture: `size` is blocks along each side, views, width and height."""
    begin(log)
    blocks, views, width, height = size
    made = CityCapture(City(blocks, seed), kind, views, width, height, 4, seed, 8, cache_bytes=0)
    where = "cuda" if device == "cuda" else "cpu"
    unfinished = folder.with_name(folder.name + ".unfinished")
    write_colmap(made, unfinished, image_format="jpg", overwrite=True, device=where, workers=2)
    unfinished.rename(folder)


def make_splat_city(kind: str, seed: int, folder: Path, views: int, device: str, log: Path) -> None:
    """Render a capture of a city with `views` views of 320x180.

    It has one block, 60,000 Gaussians and 6,000 seed points for each 100 views.
    """
    begin(log)
    unfinished, blocks = folder.with_name(folder.name + ".unfinished"), max(round((views / 100) ** 0.5), 1)
    numbers = {
        "blocks": blocks, "views": views, "width": 320, "height": 180, "seed": seed,
        "gaussians": 60_000 * blocks**2, "seed-points": 6_000 * blocks**2,
    }  # fmt: skip
    words = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    failed = splat_city.main(["--output", str(unfinished), "--kind", kind, "--device", device, *words])
    if failed:
        raise SystemExit(failed)
    unfinished.rename(folder)
