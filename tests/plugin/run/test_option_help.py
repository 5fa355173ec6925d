"""`--help` of each method: the options of ours that have an effect, frozen; and the optimizers of what the run has.

An option is ours if nerfstudio's splatfacto or nerfacto does not show it. Add new options to a list here.
"""

import contextlib
import copy
import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
import tyro
from nerfstudio.configs.method_configs import method_configs

from ns_multigpu import methods
from ns_multigpu.plugin.launch.option_help import given, show_what_applies, without_effect
from ns_multigpu.plugin.launch.removed_options import REMOVED_OPTIONS
from ns_multigpu.plugin.splats.recipe import best

STOCK = {"splatfacto": method_configs["splatfacto"], "nerfacto": method_configs["nerfacto"]}
SPECS = {
    spec.config.method_name: spec.config
    for spec in (
        methods.splatfacto_batch, methods.splatfacto_tile, methods.splatfacto_locality, methods.splatfacto_pixel,
        methods.splatfacto_aggregate, methods.nerfacto_xl,
    )
}  # fmt: skip
MOST = 50
"""Options of ours that a method may show."""


def help_text(config: Any, *words: str) -> str:
    """Return a configuration's `--help`."""
    out = io.StringIO()
    kind: Any = tyro.conf.FlagConversionOff[type(config)]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        tyro.cli(kind, default=config, args=[*words, "--help"], prog="ns-train")
    return out.getvalue()


def shown(config: Any, *words: str) -> list[str]:
    """Return the options that a configuration's `--help` lists."""
    return list(dict.fromkeys(re.findall(r"(?<![\w-])--([a-z][\w.-]*)", help_text(config, *words))))


@pytest.fixture
def ours() -> Iterator[Any]:
    """Return our options in a method's `--help`, and the rest of its output.

    The process of a real `--help` ends with it. Here the classes' annotations are put back.
    """
    expected_hints = {
        kind: dict(kind.__annotations__)
        for config in SPECS.values()
        for part in (config.pipeline, config.pipeline.model)
        for kind in type(part).__mro__
        if "__annotations__" in vars(kind)
    }

    def put_back() -> None:
        for kind, hints in expected_hints.items():
            kind.__annotations__.update(hints)

    def of(method: str, *words: str) -> list[str]:
        put_back()
        config = copy.deepcopy(SPECS[method])
        show_what_applies(config, [*words, "--help"])
        theirs = set(shown(STOCK[method.split("-")[0]]))
        return [name for name in shown(config, *words) if name not in theirs]

    yield of
    put_back()


GUARDS = """steps-per-checksum save-on-interrupt max-restarts stall-seconds stall-abort-seconds steps-per-numeric-check
    on-nonfinite fused-steps keep-checkpoints start-over allow-unseen-points verbose"""
RUN = "eval-at-start max-num-images save-in-background save-fallback-dir save-retry-seconds"
RATES = "recipe batch-scaling rates-at-end rates-fall-from"
VIEWS = "pipeline.strategy pipeline.views-per-rank pipeline.views-per-step pipeline.level-steps"
IMAGES = "pipeline.datamanager.image-memory-gb pipeline.datamanager.undistort load-ply"
MODEL = """primitive depth-loss normal-map-loss sky-loss exposure optimizer-state far-plane radius-clip densifier
    morton-order max-gs-num max-gaussians initial-opacity initial-scale"""
SPLATS = f"{GUARDS} {RUN} {RATES} {VIEWS} {IMAGES} {' '.join('pipeline.model.' + name for name in MODEL.split())}"
TILE = "pipeline.transport pipeline.wire pipeline.model.rebalance-above"
FROZEN = {
    "splatfacto-batch": f"{SPLATS} pipeline.transport",
    "splatfacto-tile": f"{SPLATS} {TILE} pipeline.tile-lists",
    "splatfacto-locality": f"{SPLATS} {TILE} "
    + " ".join(f"pipeline.locality.{name}" for name in ("patches", "group-size", "relays", "plans", "place-again-at")),
    "splatfacto-pixel": f"{SPLATS} "
    + " ".join(f"pipeline.pixel.{name}" for name in ("cells", "imbalance", "wire", "level-steps", "crossing", "hide")),
    "splatfacto-aggregate": SPLATS,
    "nerfacto-xl": f"{GUARDS} {RUN} "
    + " ".join(
        f"pipeline.model.{name}"
        for name in ("cells", "spread", "sampling", "samples-per", "proposals", "density", "depth-loss")
    ),
}
ONLY = {
    "primitive 2dgs": "densify-grad-thresh-2dgs normal-loss normal-loss-start distortion-loss distortion-loss-start",
    "primitive convex": "densify-grad-thresh-convex cull-alpha-thresh-convex",
    "depth-loss 0.01": "depth-loss-start depth-maps",
    "densifier mcmc": "gs-per-seed noise-lr mcmc-opacity-reg mcmc-scale-reg mcmc-whole-step-scale mcmc-min-opacity "
    "mcmc-picks",
}
"""By the value that makes them apply, options of the model that are shown then."""
MOVING = {"times", "motions", "durations", "cosines-dc", "cosines-rest"}
POINTS = {"means", "quats", "scales", "opacities", "features-dc", "features-rest"}


def still_there(names: list[str]) -> list[str]:
    return [name for name in names if name.replace("-", "_") not in REMOVED_OPTIONS]


def optimizers(names: list[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("optimizers.")}


@pytest.mark.parametrize("method", FROZEN)
def test_a_method_shows_what_has_an_effect(method: str, ours: Any) -> None:
    found = still_there(ours(method))
    assert sorted(found) == sorted(FROZEN[method].split())
    assert len(found) <= MOST


@pytest.mark.parametrize("method", [method for method in FROZEN if method.startswith("splatfacto")])
def test_the_recipe_is_first(method: str, ours: Any) -> None:
    assert ours(method)[0] == "recipe"
    assert next(name for name in shown(SPECS[method]) if name != "help") == "recipe"


@pytest.mark.parametrize("value", ONLY)
def test_help_shows_the_option_that_an_option_depends_on(value: str, ours: Any) -> None:
    option, chosen = value.split()
    usual, found = ours("splatfacto-batch"), ours("splatfacto-batch", f"--pipeline.model.{option}", chosen)
    more = [name.removeprefix("pipeline.model.") for name in found if name not in usual]
    assert sorted(name for name in more if not name.startswith("optimizers.")) == sorted(ONLY[value].split())
    assert set(usual) <= set(found)


def test_help_shows_the_frame_of_a_file_if_there_is_one(ours: Any) -> None:
    usual, found = ours("splatfacto-batch"), ours("splatfacto-batch", "--load-ply", "model.ply")
    assert set(found) - set(usual) == {"load-ply-frame"}


def test_help_shows_the_strategies_of_an_option(ours: Any) -> None:
    found = ours("splatfacto-batch", "--pipeline.strategy=tile")
    assert set(FROZEN["splatfacto-tile"].split()) <= set(found)


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        ("", POINTS),
        ("--pipeline.model.primitive 4dgs", POINTS | MOVING),
        ("--pipeline.model.camera-optimizer.mode SO3xR3", POINTS | {"camera-opt"}),
        ("--pipeline.model.use_bilateral_grid True", POINTS | {"bilateral-grid"}),
        ("--recipe best", POINTS | {"exposures"}),
    ],
)
@pytest.mark.usefixtures("ours")
def test_optimizers_are_those_of_what_the_run_has(words: str, groups: set[str]) -> None:
    config = copy.deepcopy(SPECS["splatfacto-batch"])
    show_what_applies(config, [*words.split(), "--help"])
    assert optimizers(shown(config, *words.split())) == groups


def test_without_help_all_options_are_taken() -> None:
    config = copy.deepcopy(SPECS["splatfacto-batch"])
    words = ["--pipeline.model.normal-loss", "0.1", "--pipeline.model.max-gs-num", "7", "--pipeline.tile-lists", "sort"]
    words += ["--pipeline.model.primitive", "convex", "--pipeline.model.cull-alpha-thresh-convex", "0.5"]
    show_what_applies(config, words)
    found: Any = tyro.cli(type(config), default=config, args=words)
    model = found.pipeline.model
    assert (model.normal_loss, model.max_gaussians, model.cull_alpha_thresh_convex) == (0.1, 7, 0.5)
    assert found.pipeline.tile_lists == "sort" and found.optimizers.keys() == config.optimizers.keys()


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--pipeline.model.noise_lr 1e5", "densifier mcmc"),
        ("--pipeline.model.mcmc-picks=both", "densifier mcmc"),
        ("--pipeline.model.normal-loss 0.1", "primitive 2dgs"),
        ("--pipeline.model.depth-maps off", "depth-loss"),
        ("--pipeline.model.rebalance-above 2", "--pipeline.strategy tile or locality"),
        ("--pipeline.model.noise-lr 1e5 --pipeline.model.densifier mcmc", None),
        ("--pipeline.model.depth-maps off --pipeline.model.depth-loss 0.1", None),
        ("--pipeline.model.sh-degree 2 --pipeline.transport peer --max-num-images 9", None),
        ("--pipeline.wire half --pipeline.tile-lists sort", None),  # refused
    ],
)
def test_given_options_without_effect_are_named(words: str, needed: str | None) -> None:
    config: Any = copy.deepcopy(SPECS["splatfacto-batch"])
    kind: Any = type(config)
    found = without_effect(tyro.cli(kind, default=config, args=words.split()), ["ns-train", "method", *words.split()])
    name = re.split("[ =]", words.replace("_", "-"))[0]
    if needed is None:
        assert found == []
    else:
        (line,) = found
        assert line.startswith(f"Note: {name} has no effect in this run") and line.endswith(f"{needed}.")


def test_help_names_what_the_recipe_sets() -> None:
    text = re.sub(r"[\s│]+", " ", help_text(SPECS["splatfacto-batch"]))
    listed = re.split(
        ", and of pipeline.model |, ",
        text.partition('"best" sets others (docs/use/recipes.md): ')[2].partition(". ")[0],
    )
    names = [name.replace("_", "-").removeprefix("pipeline.model.") for name in best(30000)]
    assert sorted(listed) == sorted(names)


def test_options_are_read_from_words() -> None:
    words = ["colmap", "--a.b-c", "1", "--d=x=y", "--e", "--f"]
    assert given(words) == {"a.b_c": "1", "d": "x=y", "e": "--f", "f": ""}
