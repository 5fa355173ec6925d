"""2D Gaussians, ours and gsplat 1.4.0's, trained with the same recipe: PSNR and SSIM, and a picture of normals.

    python -m benchmarks.captures.surfels --images 7000 --json out.json --picture normals.png -- \\
        colmap --data FOX --colmap-path sparse/0 --downscale-factor 1 --eval-mode interval --eval-interval 8

Ours is `splatfacto-batch --pipeline.model.primitive 2dgs`; gsplat's is splatfacto with `rasterization_2dgs`
(`gsplat_surfels`). Views and their order, first points, rates, losses, resolutions and refinement are the same, but for
what is drawn at random. The loss of normals counts from the middle of the run on (published: from image 7,000 of
30,000), and the threshold of densification is the published 0.0002 for both.

Both are trained side by side on one GPU, so that their times say nothing of each other; with --apart one after the
other. The picture has a row for each of a few held-out views: photograph, ours, ours as normals.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.captures.recipes import called, trains_in_forks
from benchmarks.lib.report import empty_table, write_report

SHOWN = 3
"""Views of the picture."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=7000, help="that each is trained on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--ways", nargs="+", choices=("ours", "gsplat"), default=["gsplat", "ours"])
    parser.add_argument("--normal-loss", type=float, default=0.05)
    parser.add_argument("--normal-loss-start", type=int, help="images before it counts; by default half of them")
    parser.add_argument("--apart", action="store_true", help="one after the other, so that times can be compared")
    parser.add_argument("--seconds", type=float, help="ends what is not done by then")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="on a CPU ours alone")
    parser.add_argument("--output", type=Path, help="folder for logs and runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="PNG of ours")
    parser.add_argument("dataparser", nargs="+", help="after --: the dataparser and its options")
    options = parser.parse_args(argv)
    if options.images < 1:
        parser.error(f"--images {options.images}: give at least 1")
    if options.device == "cpu" and "gsplat" in options.ways:
        parser.error("--device cpu: gsplat has no kernels for a CPU. Add --ways ours")
    if options.normal_loss_start is None:
        options.normal_loss_start = options.images // 2
    return options


def words_of(way: str, seed: int, folder: Path, options: argparse.Namespace) -> list[str]:
    """The command line of a run: of `splatfacto_baseline`, or of ns-train."""
    images, weight, start = str(options.images), str(options.normal_loss), str(options.normal_loss_start)
    if way == "gsplat":
        words = ["--images", images, "--seed", str(seed), "--output", str(folder), "--operators", "gsplat-2dgs"]
        words += ["--normal-loss", weight, "--normal-loss-start", start, "--options"]
        # One word, for it begins with dashes.
        words[-1] += "=--pipeline.model.densify-grad-thresh 0.0002 --pipeline.model.use-absgrad False"
        return [*words, "--", *options.dataparser]
    words = ["splatfacto-batch", "--pipeline.model.primitive", "2dgs", "--machine.device-type", options.device]
    words += ["--output-dir", str(folder), "--timestamp", "run", "--experiment-name", "surfels", "--vis", "tensorboard"]
    words += ["--machine.seed", str(seed), "--pipeline.datamanager.train-cameras-sampling-seed", str(seed)]
    words += ["--max-num-images", images, "--logging.steps-per-log", "500", "--steps-per-save", "1000000"]
    words += ["--steps-per-eval-image", "0", "--steps-per-eval-all-images", "0"]
    words += ["--pipeline.model.normal-loss", weight, "--pipeline.model.normal-loss-start", start]
    return [*words, *options.dataparser]


class Comparison:
    """The runs of one command.

    Args:
        options: of the command.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self.results = options, list[dict[str, Any]]()
        self._folder = options.output or Path(mkdtemp(prefix="surfels-"))

    def one(self, way: str, seed: int) -> None:
        """A run in a process of its own."""
        folder = self._folder / f"{way}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        log, output = folder / "log.txt", folder / "scores.json"
        words = words_of(way, seed, folder, self._options)
        if way == "gsplat":
            took = called("train_splatfacto", words, log, output, seconds=self._options.seconds)
        else:
            picture = self._options.picture if seed == self._options.seeds[0] else None
            shown = (SHOWN, picture) if picture is not None else None
            took = called("train_ours", words, log, output, shown, seconds=self._options.seconds)
        if took is None or not output.exists():
            Console().print(f"{way}, seed {seed}: failed, or time was up; see {log}")
            return
        found = json.loads(output.read_text())
        kept = ("psnr", "ssim", "gaussians", "train_seconds", "peak_mib")
        self.results.append({"way": way, "seed": seed, "wall_s": took, **{name: found[name] for name in kept}})
        Console().print(f"{way}, seed {seed}: {found['psnr']:.2f} dB, {found['gaussians']:,} points, {took:.0f} s")

    def go(self) -> int:
        """All runs; how many are missing."""
        runs = [(way, seed) for seed in self._options.seeds for way in self._options.ways]
        threads = [Thread(target=self.one, args=run) for run in runs]
        for thread in threads:
            thread.start()
            if self._options.apart:
                thread.join()
        for thread in threads:
            thread.join()
        return len(runs) - len(self.results)

    def summary(self) -> dict[str, Any]:
        """All results, and how they came about."""
        asked = {name: value for name, value in vars(self._options).items() if not isinstance(value, Path)}
        return {"options": asked, "argv": sys.argv[1:], "results": self.results}


def table(results: Sequence[dict[str, Any]]) -> Table:
    shown = empty_table(None, ("way", "seed", "PSNR", "SSIM", "points", "training s"))
    for one in sorted(results, key=lambda one: (one["seed"], one["way"])):
        scores = (f"{one['psnr']:.2f}", f"{one['ssim']:.4f}", f"{one['gaussians']:,}", f"{one['train_seconds']:.1f}")
        shown.add_row(one["way"], str(one["seed"]), *scores)
    return shown


def main() -> None:
    options = arguments()
    trains_in_forks()
    comparison = Comparison(options)
    missing = comparison.go()
    Console().print(table(comparison.results))
    write_report(options.json, **comparison.summary())
    if missing:
        raise SystemExit(f"{missing} runs are missing")


if __name__ == "__main__":
    main()
