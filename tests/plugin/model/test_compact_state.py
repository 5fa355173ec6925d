"""`--pipeline.model.optimizer-state compact`: moments are bfloat16 from their making to the checkpoint and back."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.engine.optimizers import AdamOptimizerConfig

from cuda_ext.ops.optim.adam import AdamStep, FusedAdam
from cuda_ext.ops.optim.compact_adam import COMPACT, CompactAdam
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.training_state import put_optimizers, take_optimizers
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.batch_scaling import RateSchedule
from ns_multigpu.plugin.model.optimizers import BatchOptimizers
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.lib.ranks import run_ranks
from tests.lib.resuming import everything, start
from tests.lib.sharding import POINTS, load, rows_of, save_sharded, whole_model, whole_state
from tests.lib.tile_training_run import MODEL, Outcome, train_model


def types_of(optimizers: Any) -> set[torch.dtype]:
    """Of the moments of points."""
    states = [state for name in ORDER for state in optimizers[name].state.values()]
    return {state[moment].dtype for state in states for moment in ("exp_avg", "exp_avg_sq")}


# ---- optimizers ----


def make_optimizers(compact: bool) -> tuple[dict[str, torch.nn.Parameter], BatchOptimizers]:
    g = torch.Generator().manual_seed(1)
    shapes = {"means": 3, "quats": 4, "scales": 3, "opacities": 1, "features_dc": 3, "features_rest": 9}
    params = {name: torch.nn.Parameter(torch.randn(40, n, generator=g)) for name, n in shapes.items()}
    poses = torch.nn.Parameter(torch.zeros(2, 6))
    config = {name: {"optimizer": AdamOptimizerConfig(lr=0.01), "scheduler": None} for name in (*ORDER, "camera_opt")}
    groups = {name: [param] for name, param in params.items()} | {"camera_opt": [poses]}
    schedule = RateSchedule("sqrt", 2, 100)
    return params, BatchOptimizers(config, groups, schedule, fused=True, compact=ORDER if compact else ())


def fill_moments(optimizers: BatchOptimizers) -> None:
    """As steps would."""
    steps = AdamStep([optimizers.optimizers[name] for name in ORDER])  # pyright: ignore
    g = torch.Generator().manual_seed(2)
    for moment in (*steps.exp_avgs, *steps.exp_avg_sqs):
        moment.copy_(torch.rand(moment.shape, generator=g))
    steps.count()


@pytest.mark.parametrize("compact", [False, True])
def test_only_points_have_compact_moments(compact: bool) -> None:
    _, optimizers = make_optimizers(compact)
    fill_moments(optimizers)
    assert types_of(optimizers.optimizers) == {COMPACT if compact else torch.float32}
    assert all(isinstance(optimizers.optimizers[name], CompactAdam) == compact for name in ORDER)
    assert type(optimizers.optimizers["camera_opt"]) is FusedAdam


def test_nothing_steps_them_but_fused_steps() -> None:
    params, optimizers = make_optimizers(True)
    fill_moments(optimizers)
    for param in params.values():
        param.grad = torch.ones_like(param)
    before = {name: param.detach().clone() for name, param in params.items()}
    with pytest.raises(TypeError, match="Compact moments are for splat_update"):
        optimizers.optimizer_step_all()
    assert all(torch.equal(params[name], value) for name, value in before.items())


@pytest.mark.parametrize("ratio", [1.0, 2.0])
@pytest.mark.parametrize(("saved", "now"), [(True, True), (True, False), (False, True)])
def test_moments_are_put_back_in_the_type_of_the_run(saved: bool, now: bool, ratio: float) -> None:
    _, before = make_optimizers(saved)
    fill_moments(before)
    tensors, values = take_optimizers(before.optimizers)
    expected = {name: value.clone() for name, value in tensors.items()}
    params, after = make_optimizers(now)
    groups = {name: [param] for name, param in params.items()}
    mine = {name: after.optimizers[name] for name in ORDER}
    put_optimizers(mine, groups, {**tensors, **values}, ratio, "sqrt")
    assert types_of(mine) == {COMPACT if now else torch.float32}
    for name in ORDER:
        state = mine[name].state[params[name]]
        for moment, factor in (("exp_avg", 1.0), ("exp_avg_sq", ratio)):
            exact = expected[f"optimizers/{name}/0/{moment}"].float() * factor
            assert torch.equal(state[moment], exact.to(COMPACT) if now else exact), "by 2 nothing is rounded"
        assert float(state["step"]) == ratio


# ---- densification ----


def test_refining_and_resetting_keep_the_type() -> None:
    params, optimizers = make_optimizers(True)
    fill_moments(optimizers)
    own = {name: optimizers.optimizers[name] for name in ORDER}
    rows = {name: own[name].state[param]["exp_avg"].clone() for name, param in params.items()}
    g = torch.Generator().manual_seed(4)
    state: dict[str, Any] = {
        "grad2d": torch.rand(40, generator=g), "count": torch.ones(40), "radii": torch.zeros(40), "scene_scale": 1.0,
    }  # fmt: skip
    rules = {"prune_opa": 0.3, "grow_grad2d": 0.5, "refine_scale2d_stop_iter": 0}
    densifier = ReplicatedDensifier(**rules, refine_start_iter=0, refine_every=10, reset_every=20)
    faint = params["opacities"].detach().flatten().sigmoid() < 0.3
    held: Any = dict(params)
    densifier._refine(held, own, state, 10)
    kept = ~faint & ~(torch.rand(40, generator=torch.Generator().manual_seed(4)) > 0.5)
    assert len(held["means"]) not in (40, 0) and types_of(own) == {COMPACT}
    moved = own["features_rest"].state[held["features_rest"]]["exp_avg"]
    assert kept.any() and len(moved) == len(held["means"])
    for row in rows["features_rest"][kept]:
        assert (moved == row).all(dim=1).any(), "a point that stays takes its moments along"
    assert (moved == 0).all(dim=1).any(), "a new point's are zero"
    densifier.refine_when_due(held, own, state, 20, 1)
    assert types_of(own) == {COMPACT}
    assert not own["opacities"].state[held["opacities"]]["exp_avg_sq"].any(), "opacities were reset"


def _trained_in_tiles(world: World, capture: Path, runs: Path, state: str, steps: int) -> Outcome:
    options = {
        MODEL + "warmup_length": 4, MODEL + "refine_every": 8, MODEL + "reset_alpha_every": 4,
        MODEL + "sh_degree_interval": 12, MODEL + "densify_grad_thresh": 0.001, MODEL + "cull_alpha_thresh": 0.06,
        MODEL + "stop_screen_size_at": 0, MODEL + "num_downscales": 0, MODEL + "optimizer_state": state,
        "fused_steps": "always", **{f"optimizers.{name}.optimizer.eps": 1e-13 for name in ORDER},
    }  # fmt: skip
    return train_model(world, True, capture, runs / f"{state}-{world.size}", options, steps, 1, double=False)


@pytest.mark.slow
def test_a_run_on_shards(tmp_path: Path, capture: Path) -> None:
    """Through refinements, rebalancing and a reset of opacities, on one rank and two."""
    train = partial(_trained_in_tiles, steps=50)
    full = train(World.single(), capture, tmp_path, "full")
    for ranks in (1, 2):
        found = run_ranks(_trained_in_tiles, ranks, capture, tmp_path, "compact", 50)[0]
        assert len(found["shards"]) == ranks and len({count for _, count in found["points"]}) >= 3
        dtypes = {name: v.dtype for name, v in found["moments"].items() if not name.endswith(".step")}
        assert {name: kind for name, kind in dtypes.items() if kind != COMPACT} == {}
        assert all(torch.isfinite(v).all() for v in (*found["moments"].values(), *found["parameters"].values()))
        assert found["points"][-1][1] == pytest.approx(full["points"][-1][1], rel=0.25)
        assert found["metrics"]["psnr"] == pytest.approx(full["metrics"]["psnr"], abs=0.5)


# ---- checkpoints ----


def _compacted(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: v.to(COMPACT) if name.endswith(("exp_avg", "exp_avg_sq")) else v for name, v in state.items()}


def _save(world: World, models: Path) -> None:
    rows = rows_of(world, [20, 0, POINTS - 20])
    assert save_sharded(world, models, 1, rows, whole_model(), _compacted(whole_state())) == ""


def _load(world: World, models: Path) -> None:
    rows, _, state = load(world, models, 1)
    for name, value in _compacted(whole_state()).items():
        if "exp_avg" in name:
            mine = value if "camera" in name else value[rows.start : rows.stop]
            assert state[name].dtype == COMPACT and torch.equal(state[name], mine), name


def test_shards_are_saved_and_read_in_their_type(tmp_path: Path) -> None:
    """By a rank that has no points, and so no moments, too."""
    run_ranks(_save, 3, tmp_path / "nerfstudio_models")
    run_ranks(_load, 2, tmp_path / "nerfstudio_models")


def test_run_resumes_from_compact_and_full_state(
    tmp_path: Path, capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its own checkpoint with the same bits; from the other kind's with moments of its own."""
    world = World.single()
    options: dict[str, Any] = {"fused_steps": "always", "keep_checkpoints": 0, "steps_per_save": 4}

    def run(name: str, state: str, **more: Any) -> Any:
        return start(world, capture, tmp_path / name, 10, optimizer_state=state, **{**options, **more})

    whole = run("whole", "compact")
    whole.train()
    saved = whole.checkpoint_dir / "step-000000004.ckpt"
    capsys.readouterr()
    resumed = run("resumed", "compact", load_checkpoint=saved)
    assert "optimizer's state" not in capsys.readouterr().out
    assert types_of(resumed.optimizers.optimizers) == {COMPACT}
    resumed.train()
    ours, theirs = everything(resumed), everything(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

    at_save = run("again", "compact", load_checkpoint=saved)
    full = run("full", "full", load_checkpoint=saved)
    said = " ".join(capsys.readouterr().out.split())
    assert "optimizer's state is compact, and is full from now on: Adam's moments are exactly what they were" in said
    moments = everything(at_save)
    for name, value in everything(full).items():
        assert value.dtype != COMPACT and torch.equal(value, moments[name].to(value.dtype)), name
    full.train()
    assert types_of(full.optimizers.optimizers) == {torch.float32}
    back = run("back", "compact", load_checkpoint=full.checkpoint_dir / "step-000000008.ckpt")
    assert "is full, and is compact from now on" in " ".join(capsys.readouterr().out.split())
    assert types_of(back.optimizers.optimizers) == {COMPACT}
    back.train()


# ---- what is refused ----


def test_a_run_whose_steps_are_not_fused_ends_at_its_start(tmp_path: Path, capture: Path) -> None:
    options: dict[str, Any] = {"optimizer_state": "compact"}
    trainer = start(World.single(), capture, tmp_path / "run", 4, **options)
    with pytest.raises(InputError, match=r"optimizer-state compact: .* not fused: on a CPU"):
        trainer.train()
    assert not list(tmp_path.rglob("*.ckpt"))
