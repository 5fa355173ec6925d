"""The recipe, by default `best`, sets what the command line leaves open; `splatfacto` sets nothing."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tyro
from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion

from ns_multigpu.core.dist.world import World
from ns_multigpu.methods import splatfacto_batch
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.surfaces import check_primitive
from ns_multigpu.plugin.splats import capacity
from ns_multigpu.plugin.splats.recipe import apply_recipe, best, recipe_lines
from ns_multigpu.primitives.densify.mcmc import McmcDensifier
from ns_multigpu.primitives.registry import PRIMITIVES
from tests.lib.resuming import start
from tests.lib.training_run import HELD_OUT, POINTS, save_nothing

IMAGES = 6000


def given(*words: str, method: str = "splatfacto-batch", ranks: int = 1) -> Any:
    """Return a config as the command line gives it, its recipe applied."""
    argv = [method, "--max-num-images", str(IMAGES), *words]
    config: Any = tyro.cli(AnnotatedBaseConfigUnion, args=argv)
    apply_recipe(config, ranks, argv)
    return config


def value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def test_splatfactos_sets_nothing() -> None:
    config: Any = deepcopy(splatfacto_batch.config)
    config.recipe = "splatfacto"
    before = deepcopy(config)
    apply_recipe(config, 1, ["splatfacto-batch", "--recipe", "splatfacto"])
    assert config == before and recipe_lines(config) == ["Recipe: splatfacto (--recipe best gives better images)."]


def test_best_is_the_default() -> None:
    config, asked = given(), given("--recipe", "best")
    assert config == asked and config.pipeline.model.densifier == "mcmc"
    assert recipe_lines(config) == recipe_lines(asked) and recipe_lines(config)[0].startswith("Recipe: best (--")


@pytest.mark.parametrize("words", ["--pipeline.model.densifier default", "--pipeline.model.densifier=default"])
def test_the_default_densifier_has_splatfactos_recipe(words: str) -> None:
    config, plain = given(*words.split()), given("--recipe", "splatfacto")
    assert config.pipeline == plain.pipeline and config.optimizers == plain.optimizers
    assert recipe_lines(config)[0].startswith("Recipe: splatfacto. best is MCMC, and the default densifier is asked")


@pytest.mark.parametrize("method", ["splatfacto-batch", "splatfacto-tile", "splatfacto-locality", "splatfacto-pixel"])
def test_every_method_has_it(method: str) -> None:
    config = given("--recipe", "best", method=method)
    for name, wanted in best(IMAGES).items():
        assert value(config, name) == wanted
    assert "--pipeline.model.densifier mcmc" in recipe_lines(config)[0] and "best" in recipe_lines(config)[0]
    assert "--pipeline.model.exposure auto" in recipe_lines(config)[0]
    assert recipe_lines(config)[0] in config.short_summary() and "None" not in recipe_lines(config)[0]


@pytest.mark.parametrize("primitive", ["2dgs", "4dgs"])
def test_primitives_without_mcmc_keep_their_densifier_with_a_message(primitive: Any) -> None:
    config, plain = (
        given("--recipe", recipe, "--pipeline.model.primitive", primitive) for recipe in ("best", "splatfacto")
    )
    assert config.pipeline.model == plain.pipeline.model and config.pipeline.model.densifier == "default"
    title = PRIMITIVES[primitive].title
    assert recipe_lines(config)[0].startswith(
        f"Recipe: splatfacto. best is MCMC, and {title} do not support it: it sets nothing"
    )
    assert recipe_lines(config)[0] in config.short_summary()
    check_primitive(config.pipeline.model, "tile")
    config = given("--recipe", "best", "--pipeline.model.primitive", primitive, "--pipeline.model.densifier", "mcmc")
    with pytest.raises(InputError, match=f"densifier mcmc is not for {title}"):
        check_primitive(config.pipeline.model, "tile")


def test_of_the_optimizers_only_the_rate_of_higher_harmonics_is_another() -> None:
    best_ones, plain = (given("--recipe", recipe).optimizers for recipe in ("best", "splatfacto"))
    rates = {name: (best_ones[name]["optimizer"].lr, plain[name]["optimizer"].lr) for name in plain}
    assert {name for name, (ours, theirs) in rates.items() if ours != theirs} == {"features_rest"}
    assert rates["features_rest"] == (pytest.approx(4 * rates["features_rest"][1]), rates["features_rest"][1])
    best_ones["features_rest"]["optimizer"].lr = rates["features_rest"][1]
    assert best_ones == plain, "and nothing else of them"


def test_command_line_overrides_the_recipe() -> None:
    """Also where it names the value that is the option's own default."""
    words = ("--pipeline.model.max-gs-num", "5000", "--pipeline.model.stop_split_at=15000")
    config = given("--recipe", "best", *words, "--pipeline.model.refine-every", "77")
    assert config.pipeline.model.max_gaussians == 5000 and config.pipeline.model.stop_split_at == 15000
    assert config.pipeline.model.refine_every == 77
    assert config.pipeline.model.densifier == "mcmc", "the others are the recipe's"
    assert "stop-split-at" not in recipe_lines(config)[0] and "refine-every" not in recipe_lines(config)[0]


def test_short_runs_refine_more_often_and_long_ones_longer() -> None:
    every, stop = "pipeline.model.refine_every", "pipeline.model.stop_split_at"
    assert [best(n)[every] for n in (100, 7000, 12000, 15000, 30000)] == [50, 50, 80, 100, 100]
    assert [best(n)[stop] for n in (7000, 30000, 60000)] == [25000, 25000, 50000]
    assert [best(n)["pipeline.model.gs_per_seed"] for n in (7000, 11000, 15000, 30000)] == [9, 11, 13, 13]
    config = given("--recipe", "best", "--max-num-iterations", "6000", "--pipeline.views-per-rank", "2", ranks=3)
    assert config.pipeline.model.refine_every == 50, "at most 6,000 images"
    config = given("--recipe", "best", "--max-num-images", "60000", "--pipeline.views-per-rank", "2", ranks=3)
    assert config.pipeline.model.stop_split_at == 50000, "images, not steps"


@pytest.mark.parametrize("views", [1, 2])
def test_all_rates_fall_over_the_last_part_of_the_run_and_not_before(views: int) -> None:
    """Whatever its length, and however many views a step has: by images seen, and times what else rates follow."""
    words = ("--batch-scaling", "none", "--pipeline.views-per-rank", str(views))
    schedule = given("--recipe", "best", *words).rate_schedule(views, 50)
    steps = IMAGES // views
    factors = [schedule.at(round(part * steps)) for part in (0.0, 0.84, 0.85, 0.925, 1.0)]
    assert factors == pytest.approx([1, 1, 1, 0.1**0.5, 0.1])
    assert given("--recipe", "splatfacto", *words).rate_schedule(views, 50).at(steps) == 1, "splatfacto's do not"


@pytest.mark.parametrize("recipe", ["best", "splatfacto"])
def test_resumed_run_keeps_its_options(recipe: Any) -> None:
    config: Any = deepcopy(splatfacto_batch.config)
    config.recipe = recipe  # as its file says
    before = deepcopy(config)
    apply_recipe(config, 1, ["splatfacto-batch", "--load-config", "config.yml"])
    assert config == before
    with pytest.raises(InputError, match=rf"--recipe {recipe}: .*Leave --recipe out"):
        apply_recipe(config, 1, ["splatfacto-batch", "--load_config=config.yml", "--recipe", recipe])


def test_cap_is_chosen_from_the_capture_and_reported(
    tmp_path: Path, capture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels decide here: 8 views of 28 x 24; the model grows up to that, and no further."""
    said: list[str] = []
    monkeypatch.setattr(capacity, "CONSOLE", SimpleNamespace(print=lambda text, **_: said.append(str(text))))
    monkeypatch.setattr("ns_multigpu.primitives.densify.cap.PIXELS_EACH", 80)
    monkeypatch.setattr("ns_multigpu.primitives.densify.cap.LEAST_PER_SEED", 1)
    trainer = start(
        World.single(), capture, tmp_path / "run", 24,
        densifier="mcmc", max_gaussians=None, mcmc_min_opacity=1e-6, refine_every=2, warmup_length=1,
    )  # fmt: skip
    model = trainer.pipeline.model
    expected = 8 * 28 * 24 // 80
    assert HELD_OUT and expected > POINTS
    assert model.config.max_gaussians == expected
    save_nothing(trainer)
    trainer.train()
    assert isinstance(model.densifier, McmcDensifier) and model.densifier.cap_max == expected
    assert model.num_points == expected
    assert "pixels of the training views" in said[0] and f"cap {expected:,} (" in said[0]


def test_the_cap_counts_as_many_for_each_seed_point_as_asked(
    tmp_path: Path, capture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ns_multigpu.primitives.densify.cap.PIXELS_EACH", 1)
    asked = {"densifier": "mcmc", "max_gaussians": None}
    model = start(World.single(), capture, tmp_path / "a", 1, **asked, gs_per_seed=3).pipeline.model
    assert model.config.max_gaussians == 3 * POINTS and "3 for each of" in model.chosen_cap.why
    with pytest.raises(InputError, match=r"--pipeline.model.gs-per-seed 0: give 1 or more"):
        start(World.single(), capture, tmp_path / "b", 1, **asked, gs_per_seed=0)


@pytest.mark.parametrize("wrong", [{"initial_opacity": 1.0}, {"initial_opacity": 0.0}, {"initial_scale": 0.0}])
def test_gaussians_that_cannot_be_are_refused(tmp_path: Path, capture: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"--pipeline.model.initial-(opacity|scale) .*: give a number above 0"):
        start(World.single(), capture, tmp_path / "run", 1, **wrong)


def test_gaussians_have_the_requested_initial_size(tmp_path: Path, capture: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [("a", {}), ("b", {"initial_opacity": 0.5, "initial_scale": 0.25})]
    usual, other = (
        start(World.single(), capture, tmp_path / name, 1, **options).pipeline.model for name, options in cases
    )
    assert torch.allclose(usual.opacities.sigmoid(), torch.full_like(usual.opacities, 0.1))
    assert torch.allclose(other.opacities.sigmoid(), torch.full_like(usual.opacities, 0.5))
    assert torch.allclose(other.scales.exp(), 0.25 * usual.scales.exp())
