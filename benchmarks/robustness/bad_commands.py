"""Wrong commands: options, runs that go on, nerfstudio's other commands. Imported for its cases."""

import os
import shutil

from benchmarks.robustness.bad_cases import CASES, TWO, Case, Place, case, cut

# ---- options ----


@case("--data that is nowhere")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    return place.train(data="/no/such/place"), 1, ("--data /no/such/place",)


@case("more workers than cores")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    workers = (os.cpu_count() or 1) + 1
    return place.train("--machine.num-devices", str(workers)), 0, (f"Note: {workers} workers share",)


@case("999 workers")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    return place.train("--machine.num-devices", "999"), 1, ("--machine.num-devices 999", "GB of memory")


def _option(words: tuple[str, ...], found: tuple[str, ...], status: int = 1) -> Case:
    return lambda place: (place.train(*words), status, found)


CASES |= {
    "--max-num-images 0": _option(("--max-num-images", "0"), ("--max-num-images 0", "nothing to train")),
    "--max-num-images -5": _option(("--max-num-images", "-5"), ("--max-num-images -5",)),
    "no worker": _option(("--machine.num-devices", "0"), ("--machine.num-devices 0",)),
    "GPUs that are not there": _option(
        ("--machine.device-type", "cuda", "--machine.num-devices", "64"), ("--machine.num-devices 64", "torch sees")
    ),
    "device type mps": _option(("--machine.device-type", "mps"), ("mps is not supported",)),
    "a strategy misspelt": _option(("--pipeline.strategy", "tiel"), ("Did you mean 'tile'",)),
    "views that ranks cannot share equally": _option((*TWO, "--pipeline.views-per-step", "3"), ("multiple of 2",)),
    "MCMC with a cap below the seed points": _option(
        ("--pipeline.model.densifier", "mcmc", "--pipeline.model.max-gaussians", "10"), ("max-gaussians 10",)
    ),
    "--rates-at-end 0": _option(("--rates-at-end", "0"), ("--rates-at-end 0.0",)),
    "--mixed-precision True": _option(("--mixed-precision", "True"), ("--mixed-precision True is not supported",)),
    "peer memory on a CPU": _option((*TWO, "--pipeline.transport", "peer"), ("--pipeline.transport peer",)),
    "--save-fallback-dir in /proc": _option(("--save-fallback-dir", "/proc/here"), ("--save-fallback-dir /proc/here",)),
    "--save-retry-seconds -1": _option(("--save-retry-seconds", "-1"), ("--save-retry-seconds -1",)),
    "--image-memory-gb 0": _option(("--pipeline.datamanager.image-memory-gb", "0"), ("image-memory-gb 0",)),
    "memory for less than two images": _option(
        ("--pipeline.datamanager.image-memory-gb", "0.00001"), ("image-memory-gb",)
    ),
    "several machines without torchrun": _option(("--machine.num-machines", "2"), ("torchrun --nnodes 2",)),
    "--load-dir that is nowhere": _option(("--load-dir", "/no/run"), ("--load-dir /no/run",)),
    "--load-checkpoint that is nowhere": _option(("--load-checkpoint", "/no/file.ckpt"), ("no such file",)),
    "--keep-checkpoints -1": _option(("--keep-checkpoints", "-1"), ("--keep-checkpoints -1",)),
}


@case("an output folder that is a file")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (place.folder / "out").write_text("in the way")
    return place.train(), 1, ("cannot be written", "--output-dir")


# ---- going on ----


@case("--load-config alone")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    command = ["ns-train", "splatfacto-batch", "--load-config", str(place.run / "config.yml")]
    return command, 1, ("holds checkpoints up to step", "--load-dir", "--start-over True")


@case("--load-config of another method")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    command = ["ns-train", "splatfacto-tile", "--load-config", str(place.run / "config.yml")]
    return command, 1, ("method is splatfacto-batch",)


@case("--load-config of no run")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (place.folder / "config.yml").write_text("a: [1, 2")
    command = ["ns-train", "splatfacto-batch", "--load-config", str(place.folder / "config.yml")]
    return command, 2, ("it is damaged, or no config.yml",)


@case("the same --timestamp twice")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    out = ("--output-dir", str(place.run.parents[2]), "--timestamp", "now", "--experiment-name", "fox")
    return place.train(*out), 1, ("holds checkpoints up to step",)


@case("a resume with another sh-degree")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    models = ("--load-dir", str(place.run / "nerfstudio_models"))
    return place.train(*models, "--pipeline.model.sh-degree", "1"), 1, ("--pipeline.model.sh-degree",)


@case("a resume with other options")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    command = ["ns-train", "splatfacto-batch", "--load-config", str(place.run / "config.yml"), "--load-dir"]
    more = ("--max-num-images", "24", "--pipeline.model.cull-alpha-thresh", "0.2")
    return (
        [*command, str(place.run / "nerfstudio_models"), *more],
        0,
        ("cull-alpha-thresh 0.2 (was 0.1)", "24 (was 16)"),
    )


@case("--load-step that is not there")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    models = ("--load-dir", str(place.run / "nerfstudio_models"), "--load-step", "777")
    return place.train(*models), 1, ("--load-step 777", "has no such step")


@case("a checkpoint cut short")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (checkpoint,) = (place.run / "nerfstudio_models").glob("*.ckpt")
    cut(checkpoint, 0.5)
    return place.train(*TWO, "--load-checkpoint", str(checkpoint)), 1, (checkpoint.name,)


@case("a run that was moved")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    moved = place.folder / "moved"
    place.run.rename(moved)
    out = ("--output-path", str(place.folder / "eval.json"))
    return ["ns-eval", "--load-config", str(moved / "config.yml"), *out], 0, ("Saved results",)


@case("config.yml copied alone")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    shutil.copy(place.run / "config.yml", place.folder / "config.yml")
    out = ("--output-path", str(place.folder / "eval.json"))
    words = ("Note: there are no checkpoints next to", "where the run began")
    return ["ns-eval", "--load-config", str(place.folder / "config.yml"), *out], 0, words


@case("config.yml copied alone, of a run that is gone")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    text = (place.run / "config.yml").read_text().replace("- whole\n", "- gone\n")
    (place.folder / "config.yml").write_text(text)
    out = ("--output-path", str(place.folder / "eval.json"))
    return ["ns-eval", "--load-config", str(place.folder / "config.yml"), *out], 1, ("no checkpoints next to it",)


@case("ns-render spiral")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    out = ("--output-path", str(place.folder / "spiral"), "--output-format", "images", "--seconds", "0.2")
    return ["ns-render", "spiral", "--load-config", str(place.run / "config.yml"), *out], 0, ("Render Complete",)


@case("a camera path that is none")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (place.folder / "path.json").write_text("{}")
    command = ["ns-multigpu", "render", "--load-config", str(place.run / "config.yml"), "--camera-path-filename"]
    return [*command, str(place.folder / "path.json")], 1, ("this is no camera path",)


for _points in ("none", "-4", "0", "1e99"):
    CASES[f"plan --points {_points}"] = lambda place, points=_points: (
        ["ns-multigpu", "plan", "--image", "1920x1080", "--points", points], 1, ("points",),
    )  # fmt: skip
CASES["plan --points 4e6"] = lambda place: (
    ["ns-multigpu", "plan", "--image", "1920x1080", "--points", "4e6"],
    0,
    ("4,000,000",),
)
