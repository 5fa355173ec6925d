"""A run says before it begins that pruning by size would take much of the model, and only then."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ns_multigpu.plugin.splats.capacity as capacity
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.densifiers import make_densifier
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.splats.capacity import MANY, warn_of_size_rule
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from tests.lib.ranks import run_ranks
from tests.lib.resuming import start
from tests.lib.training_run import save_nothing, write_capture

RULES = {"prune_scale3d": 0.5, "reset_every": 3000, "refine_stop_iter": 15000}


def _said(world: World, part: float, images: int, **rules: Any) -> list[str]:
    """Return the message for 100 points of which some are large, all of them on the first rank."""
    sizes = torch.full((100, 3), 0.1)
    sizes[: round(100 * part), 1] = 0.6
    mine = sizes[world.rank * 100 // world.size : (world.rank + 1) * 100 // world.size]
    densifier = ReplicatedDensifier(**{**RULES, **rules})
    model = SimpleNamespace(
        densifier=densifier, densifier_state={"scene_scale": 1.0}, gauss_params={"scales": mine.log()}
    )
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "CONSOLE", SimpleNamespace(print=lambda text: said.append(str(text))))
        warn_of_size_rule(model, world, images)
    return said


def test_size_message_appears_once_if_relevant() -> None:
    alone = World.single()
    (said,) = _said(alone, 0.77, 7000)
    assert said.startswith("77 % of the Gaussians are larger than --pipeline.model.cull-scale-thresh 0.5")
    assert "after image 3,000" in said and "cull-scale-thresh inf" in said and "--recipe best" in said
    assert _said(alone, MANY, 7000) == [], "a few are no matter"
    assert _said(alone, 0.77, 3000) == [], "the run ends before that"
    assert _said(alone, 0.77, 7000, refine_stop_iter=2900) == [], "refinement ends before that"
    assert _said(alone, 0.77, 7000, prune_scale3d=float("inf")) == []
    model = SimpleNamespace(densifier=SimpleNamespace(cap_max=1))
    warn_of_size_rule(model, alone, 7000)  # MCMC has no such rule
    first, second = run_ranks(_said, 2, 0.4, 7000)
    assert first == _said(alone, 0.4, 7000) and second == [], "of the whole model, by rank 0"


@pytest.mark.parametrize("limit", [0.0, -0.5, float("nan")])
def test_a_limit_that_is_no_size_is_refused(limit: float) -> None:
    options = SplatModelConfig(cull_scale_thresh=limit)
    with pytest.raises(InputError, match=f"cull-scale-thresh {limit:g}: .* or inf to prune nothing by size"):
        make_densifier(options, 10, World.single(), 1)


def test_run_prints_the_size_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_capture(tmp_path / "capture", wide=False)
    for limit, expected in ((1e-4, 1), (1e4, 0)):
        options = {"cull_scale_thresh": limit, "reset_alpha_every": 1}  # a reset with each refinement, by image 6
        trainer = start(World.single(), tmp_path / "capture", tmp_path / str(limit), 7, **options)
        save_nothing(trainer)
        trainer.train()
        assert capsys.readouterr().out.count("are larger than") == expected


@pytest.mark.parametrize(
    ("option", "value"),
    [("noise_lr", -1.0), ("noise_lr", math.nan), ("noise_lr", math.inf), ("mcmc_opacity_reg", -1.0),
     ("mcmc_scale_reg", -1.0), ("mcmc_whole_step_scale", -1.0), ("mcmc_min_opacity", 2.0), ("mcmc_min_opacity", 0.0),
     ("refine_every", 0)],
)  # fmt: skip
def test_numbers_without_sense_are_refused(option: str, value: float) -> None:
    options = SplatModelConfig(densifier="mcmc", **{option: value})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"--pipeline.model.{option.replace('_', '-')} .*: give"):
        make_densifier(options, 10, World.single(), 0)
