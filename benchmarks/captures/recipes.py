"""Recipes side by side on several captures: held-out PSNR and SSIM, Gaussians, memory and time, one table.

    python -m benchmarks.captures.recipes --captures fox=../data/fox ../data/bonsai aerial-1 street-1 \\
        --recipes splatfacto mcmc best --images 7000 15000 30000 --seeds 42 43 44 --at-once 4 --json recipes.json

"Corrected" is PSNR after nerfstudio's colour correction (`cc_psnr`), where at most 100 views are held out.

A capture is a folder in COLMAP's layout (NAME=FOLDER, or FOLDER alone), every 8th view held out; or a city
of ours, `aerial-SEED` or `street-SEED`, which is rendered into --cities first; or `aerial-SEED-VIEWS`, a city of
VIEWS / 100 blocks in that many small pictures, drawn by `benchmarks.captures.splat_city`. In a --plan, `fox~0.2` is
fox with a fifth of its views to train on, evenly spread, and the others held out. A recipe is one of

- `splatfacto`: nerfstudio's own, with gsplat; one run is scored at each of --images, for its schedules do not differ;
- `gsplat-2dgs`: that with gsplat's 2D Gaussians (`gsplat_surfels`); `2dgs`: ours with the same recipe, losses and
  threshold of densification, which is the published one;
- `ours`: splatfacto's recipe in `splatfacto-batch`; `mcmc`: that with gsplat's settings of MCMC and a cap of a million;
- `best`: `--recipe best`;
- a name from the file --variants, whose lines are `NAME = RECIPE OPTIONS`: a recipe of ours with options of ns-train,
  in which `@0.5` is half of the run's images.

With --plan FILE the runs are those of its lines instead, in that order, `CAPTURES | RECIPES | IMAGES | SEEDS`, each
separated by blanks. Runs that --json holds already are not repeated. After --seconds no run begins that would not end
in time, by what its like have taken, and runs that are under way are ended.

With --at-once above 1 runs share a GPU: their times say nothing, and each result says so (`alone`). With --gpus there
are so many at once on each of these GPUs.

LPIPS is not measured: it needs weights of a network that no package contains.
"""

import argparse
import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from queue import SimpleQueue
from shutil import rmtree
from tempfile import mkdtemp
from threading import Condition
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib.report import empty_table, write_report

MODEL = "--pipeline.model."
RECIPES: dict[str, list[str] | None] = {
    "splatfacto": None,
    "ours": ["--recipe", "splatfacto"],
    "mcmc": [
        "--recipe", "splatfacto", MODEL + "densifier", "mcmc", MODEL + "max-gaussians", "1000000",
        MODEL + "stop-split-at", "25000", MODEL + "initial-opacity", "0.5", MODEL + "initial-scale", "0.1",
    ],
    "best": ["--recipe", "best"],
    "gsplat-2dgs": None,
    "2dgs": [
        "--recipe", "splatfacto", MODEL + "primitive", "2dgs", MODEL + "normal-loss", "0.05",
        MODEL + "normal-loss-start", "@0.5",
    ],
}  # fmt: skip
"""Options of ns-train by the recipe's name; None is nerfstudio's own method. MCMC's settings are those of gsplat's
`examples/benchmarks/mcmc.sh` (`simple_trainer.py mcmc`), its cap apart."""

PEERS = {
    "splatfacto": [],
    "gsplat-2dgs": [
        "--operators", "gsplat-2dgs", "--normal-loss", "0.05", "--normal-loss-start", "@0.5",
        f"--options={MODEL}densify-grad-thresh 0.0002 {MODEL}use-absgrad False",
    ],
}  # fmt: skip
"""Options of `splatfacto_baseline` by the recipe's name."""

INTERVAL = ["--eval-mode", "interval", "--eval-interval", "8"]


@dataclass(frozen=True)
class Job:
    """A run: `images` are the numbers after which it is scored, the last of which ends it."""

    capture: str
    recipe: str
    images: tuple[int, ...]
    seed: int

    @property
    def name(self) -> str:
        """The capture's, as in the results."""
        return Path(self.capture.partition("=")[0]).name

    @property
    def of(self) -> str:
        """The name of the capture's folder."""
        return self.name.partition("~")[0]

    @property
    def split(self) -> list[str]:
        """Options of which views are held out."""
        _, few, fraction = self.name.partition("~")
        return ["--eval-mode", "fraction", "--train-split-fraction", fraction] if few else INTERVAL

    def rows(self) -> list[tuple[str, str, int, int]]:
        return [(self.name, self.recipe, images, self.seed) for images in self.images]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captures", nargs="+", default=[], help="NAME=FOLDER, FOLDER, aerial-SEED, street-SEED…")
    parser.add_argument("--recipes", nargs="+", default=["ours", "mcmc", "best"])
    parser.add_argument("--images", nargs="+", type=int, default=[7000])
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--variants", type=Path, help="a file with further recipes")
    parser.add_argument("--plan", type=Path, help="a file with the runs, in their order")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the GPU")
    parser.add_argument("--gpus", nargs="+", help="their numbers, as in CUDA_VISIBLE_DEVICES; by default those of it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--method", default="splatfacto-batch", help="of the runs of ours")
    parser.add_argument("--cities", type=Path, help="folder for cities' captures; by default a temporary one")
    parser.add_argument("--city-size", nargs=4, type=int, default=[3, 160, 960, 540], help="blocks, views, W, H")
    parser.add_argument("--downscale-factor", type=int, default=1, help="of the captures' images")
    parser.add_argument("--output", type=Path, help="folder for the runs' logs; by default a temporary one")
    parser.add_argument("--pictures", type=Path, help="folder: of each run the middle held-out view, as a PNG")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args(argv)


def variants(text: str) -> dict[str, list[str] | None]:
    """Return the recipes of a file of variants and the built-in ones."""
    found = dict(RECIPES)
    for line in text.splitlines():
        name, equals, rest = line.partition("=")
        if not line.strip() or line.startswith("#"):
            continue
        base, *options = rest.split()[:1], *rest.split()[1:]
        if not equals or not base or found.get(base[0]) is None:
            raise SystemExit(f"--variants: {line!r} is no NAME = RECIPE OPTIONS with a recipe of ours before it")
        found[name.strip()] = [*(found[base[0]] or []), *options]
    return found


def jobs_of(options: argparse.Namespace, recipes: Mapping[str, Any]) -> list[Job]:
    """Return the runs in order."""
    lines = [[options.captures, options.recipes, options.images, options.seeds]]
    if options.plan is not None:
        text = options.plan.read_text().splitlines()
        lines = [[part.split() for part in line.split("|")] for line in text if line.strip() and line[0] != "#"]
    found: dict[Job, None] = {}
    for line in lines:
        if len(line) != 4:
            raise SystemExit("--plan: a line is CAPTURES | RECIPES | IMAGES | SEEDS")
        captures, names, images, seeds = line
        lengths = sorted(int(n) for n in images)
        for seed in seeds:
            for capture in captures:
                for name in names:
                    if name not in recipes:
                        raise SystemExit(f"there is no recipe {name!r}: {', '.join(recipes)}")
                    whole = name == "splatfacto"
                    for some in [tuple(lengths)] if whole else [(n,) for n in lengths]:
                        found[Job(capture, name, some, int(seed))] = None
    return list(found)


def folders_of(options: argparse.Namespace, jobs: Sequence[Job]) -> tuple[dict[str, Path], list[str]]:
    """Return the folders of captures by name, and the requested cities."""
    folders = {}
    for word in options.captures:
        name, equals, folder = word.partition("=")
        folders[name if equals else Path(word).name] = Path(folder if equals else word)
    asked = dict.fromkeys(job.of for job in jobs)
    cities = [name for name in asked if re.fullmatch(r"(aerial|street)-\d+(-\d+)?", name)]
    for name in asked:
        if name in cities:
            folders[name] = (options.cities or Path(mkdtemp(prefix="cities-"))) / name
        elif name not in folders or not folders[name].is_dir():
            raise SystemExit(f"there is no folder of the capture {name}: give --captures {name}=FOLDER")
    return folders, cities


def words_of(job: Job, option_words: list[str] | None, folder: Path, output: Path, options: Any) -> list[str]:
    """Return the command line of a run."""
    data = ["colmap", "--data", str(folder), "--colmap-path", "sparse/0"]
    data += ["--downscale-factor", str(options.downscale_factor), *job.split]
    own = PEERS[job.recipe] if option_words is None else option_words
    at_length = [str(round(float(w[1:]) * job.images[-1])) if w[:1] == "@" else w for w in own]
    if option_words is None:
        words = [*at_length, "--images", str(job.images[-1]), "--seed", str(job.seed), "--output", str(output)]
        return [*words, "--also-at", *map(str, job.images[:-1]), "--", *data]
    words = [options.method, "--output-dir", str(output), "--timestamp", "run", "--experiment-name", "recipe"]
    words += ["--machine.device-type", options.device, "--machine.seed", str(job.seed), "--vis", "tensorboard"]
    words += ["--pipeline.datamanager.train-cameras-sampling-seed", str(job.seed)]
    words += ["--max-num-images", str(job.images[-1]), "--logging.steps-per-log", "500", "--steps-per-save", "1000000"]
    words += ["--steps-per-eval-image", "0", "--steps-per-eval-all-images", "0"]
    if job.images[-1] > 30000:
        words += ["--max-num-iterations", str(job.images[-1])]
    return [*words, *at_length, *data]


class Runs:
    """The runs of one command, as many at once as were asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.perf_counter()
        self.recipes = variants(options.variants.read_text() if options.variants else "")
        self.jobs = jobs_of(options, self.recipes)
        self.folders, self.cities = folders_of(options, self.jobs)
        self.logs = options.output or Path(mkdtemp(prefix="recipes-"))
        for option, place in (("--output", self.logs), ("--pictures", options.pictures)):
            if place is not None:
                if place.exists() and not place.is_dir():
                    raise SystemExit(f"{option} {place}: that is a file. Give a folder.")
                place.mkdir(parents=True, exist_ok=True)
        before = json.loads(options.json.read_text()) if options.json.exists() else {"results": []}
        self.results: list[dict[str, Any]] = before["results"]
        done = {(r["capture"], r["recipe"], r["images"], r["seed"]) for r in self.results}
        self.waiting = [job for job in self.jobs if not done.issuperset(job.rows())]
        self.ready = {name for name in self.folders if name not in self.cities or self.folders[name].is_dir()}
        self.changed = Condition()
        gpus = options.gpus or [None]
        self.gpus = SimpleQueue[str | None]()
        for place in range(len(gpus) * options.at_once):
            self.gpus.put(gpus[place % len(gpus)])
        self.took: dict[tuple[str, str, tuple[int, ...]], float] = {}
        trains_in_forks()

    def left(self) -> float:
        return self.options.seconds - (time.perf_counter() - self.began)

    def call(self, function: str, *given: Any, gpu: str | None = None) -> float | None:
        """Run `called` in the time that is left."""
        seconds = None if self.left() == float("inf") else max(self.left(), 0.0)
        return called(function, *given, seconds=seconds, gpu=gpu)

    def make(self, city: str, gpu: str | None) -> None:
        kind, seed, *views = city.split("-")
        self.folders[city].parent.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{city}.log"
        size = tuple(self.options.city_size)
        function, described = ("make_splat_city", int(views[0])) if views else ("make_city", size)
        given = (kind, int(seed), self.folders[city], described, self.options.device, log)
        took = self.call(function, *given, gpu=gpu)
        Console().print(f"{city}: " + ("not made; see " + str(log) if took is None else f"made in {took:.0f} s"))
        with self.changed:
            if took is None:
                self.waiting = [job for job in self.waiting if job.of != city]
            else:
                self.ready.add(city)
            self.changed.notify_all()

    def next(self) -> Job | None:
        """Return the first run that can begin and end in time, or None if there is none left."""
        with self.changed:
            while self.waiting and self.left() > 0:
                for job in self.waiting:
                    expected = self.took.get((job.of, self._kind(job), job.images), 0.0)
                    if job.of in self.ready and expected < self.left():
                        self.waiting.remove(job)
                        return job
                if all(job.of in self.ready for job in self.waiting):
                    return None
                self.changed.wait(timeout=max(min(self.left(), 60.0), 0.0))
            return None

    def _kind(self, job: Job) -> str:
        return "splatfacto" if self.recipes[job.recipe] is None else "ours"

    def work(self) -> None:
        gpu = self.gpus.get()
        while (job := self.next()) is not None:
            self.one(job, gpu)

    def one(self, job: Job, gpu: str | None) -> None:
        label = f"{job.name}-{job.recipe}-{job.images[-1]}-{job.seed}"
        folder, log, output = self.logs / label, self.logs / f"{label}.log", self.logs / label / "recipe.json"
        folder.mkdir(parents=True, exist_ok=True)
        words = words_of(job, self.recipes[job.recipe], self.folders[job.of], folder, self.options)
        picture = None if self.options.pictures is None else self.options.pictures / f"{label}.png"
        took = self.call("train_" + self._kind(job), words, log, output, picture, gpu=gpu)
        if took is None or not output.exists():
            looks = folder / "looks.json"
            self._keep(job, json.loads(looks.read_text()) if looks.exists() else [], {"wall_s": None})
            rmtree(folder, ignore_errors=True)
            Console().print(f"{label}: " + ("time is up" if self.left() <= 0 else f"failed; see {log}"))
            return
        found = json.loads(output.read_text())
        rmtree(folder, ignore_errors=True)  # checkpoints are large and not needed
        self.took[job.of, self._kind(job), job.images] = took
        self._keep(job, [*found.pop("looks", []), found | {"images": job.images[-1]}], {"wall_s": took})
        Console().print(f"{label}: {found['psnr']:.2f} dB, {found['gaussians']:,} Gaussians, {took:.0f} s")

    def _keep(self, job: Job, looks: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> None:
        """Save the scores that are new."""
        options = " ".join(self.recipes[job.recipe] or [])
        more = {"options": options, "alone": self.options.at_once == 1, **more}
        with self.changed:
            done = {(r["capture"], r["recipe"], r["images"], r["seed"]) for r in self.results}
            for look in looks:
                kept = {k: v for k, v in look.items() if k not in ("earlier", "refinements", "bytes_per_step")}
                if (job.name, job.recipe, look["images"], job.seed) not in done:
                    self.results.append({**asdict(job), "capture": job.name, **more, **kept})
            self._write()

    def _write(self) -> None:
        write_report(self.options.json, city_size=self.options.city_size, results=self.results)

    def go(self) -> None:
        wanted = {job.of for job in self.waiting}
        cities = [city for city in self.cities if city not in self.ready and city in wanted]
        gpus, workers = self.options.gpus or [None], self.gpus.qsize()
        makers = [partial(self.make, city, gpus[place % len(gpus)]) for place, city in enumerate(cities)]
        with ThreadPoolExecutor(workers + len(makers) + 1) as pool:
            tasks = [pool.submit(task) for task in [*makers, *[self.work] * workers]]
            for task in tasks:
                task.result()


def trains_in_forks() -> None:
    """Make `called` fork from a server that has imported `recipe_run`. Call it before the first `called`."""
    # The server must not have used CUDA's driver: see `ns_multigpu.plugin.launch.processes`.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    forkserver.set_forkserver_preload(["benchmarks.captures.recipe_run"])


def called(function: str, *given: Any, seconds: float | None = None, gpu: str | None = None) -> float | None:
    """Call a function of `recipe_run` in its own process, with all GPUs visible or only one.

    Returns the seconds it took, or None if it failed or timed out.
    """
    start = time.perf_counter()
    process = multiprocessing.get_context("forkserver").Process(target=_call, args=(gpu, function, *given))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return time.perf_counter() - start if process.exitcode == 0 else None


def _call(gpu: str | None, function: str, *given: Any) -> None:
    """Run in the forked process."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # nothing has asked CUDA yet: see `trains_in_forks`
    from benchmarks.captures import recipe_run

    getattr(recipe_run, function)(*given)


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return means over seeds, by capture, images and recipe."""
    heads = ("capture", "images", "recipe", "seeds", "PSNR", "corrected", "SSIM", "Gaussians", "MiB", "training s")
    shown = empty_table(None, heads, left=(0, 2))
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for result in sorted(results, key=lambda r: (r["capture"], r["images"])):
        groups.setdefault((result["capture"], result["images"], result["recipe"]), []).append(result)
    for (capture, images, recipe), rows in groups.items():
        timed = [row["train_seconds"] for row in rows if row["alone"]]
        memory = [row["peak_mib"] for row in rows if row.get("peak_mib")]
        corrected = [row["cc_psnr"] for row in rows if row.get("cc_psnr") is not None]
        psnr, ssim, gaussians = (statistics.mean(row[k] for row in rows) for k in ("psnr", "ssim", "gaussians"))
        spread = max(row["psnr"] for row in rows) - min(row["psnr"] for row in rows)
        shown.add_row(
            capture, f"{images:,}", recipe, str(len(rows)), f"{psnr:.2f}" + (f" ±{spread / 2:.2f}" if spread else ""),
            f"{statistics.mean(corrected):.2f}" if corrected else "", f"{ssim:.4f}", f"{gaussians:,.0f}",
            f"{max(memory):,.0f}" if memory else "",
            f"{statistics.mean(timed):.1f}" if timed else "",
        )  # fmt: skip
    return shown


def main() -> None:
    runs = Runs(arguments())
    runs.go()
    Console(width=130).print(table(runs.results))
    done = {(r["capture"], r["recipe"], r["images"], r["seed"]) for r in runs.results}
    missing = [job for job in runs.jobs if not done.issuperset(job.rows())]
    if missing:
        raise SystemExit(f"{len(missing)} of {len(runs.jobs)} runs are missing: run it again, or see the logs")


if __name__ == "__main__":
    main()
