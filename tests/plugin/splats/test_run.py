"""A batch of B views follows the trajectory of B steps of one view: optimizers, clocks, and three workers as one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.engine.optimizers import AdamOptimizerConfig, OptimizerConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.model.batch_scaling import RateSchedule, ScalingRule
from ns_multigpu.plugin.model.optimizers import BatchOptimizers
from ns_multigpu.plugin.model.splat_model import SplatModel
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from tests.lib.ranks import run_ranks
from tests.lib.training_run import follow, write_capture

MODEL = "pipeline.model."
IMAGES = 48
SMALL = {
    MODEL + "num_downscales": 1, MODEL + "resolution_schedule": 16, MODEL + "warmup_length": 4,
    MODEL + "refine_every": 8, MODEL + "reset_alpha_every": 3, MODEL + "sh_degree_interval": 12,
    MODEL + "densify_grad_thresh": 0.0005, MODEL + "cull_alpha_thresh": 0.06, MODEL + "stop_screen_size_at": 0,
}  # fmt: skip
SAME_ORDER = {"pipeline.level_steps": False}
"""Whatever the batch, the same images at the same time."""
MCMC = {
    MODEL + "densifier": "mcmc", MODEL + "max_gaussians": 64, MODEL + "mcmc_min_opacity": 0.095,
    MODEL + "noise_lr": 5e3,
}  # fmt: skip


def make(rule: ScalingRule, batch: int, config: OptimizerConfig, size: int) -> tuple[BatchOptimizers, Tensor]:
    """Optimizers of one parameter that starts at zero."""
    param = torch.nn.Parameter(torch.zeros(size))
    schedule = RateSchedule(rule, batch, images=10**9)
    return BatchOptimizers({"x": {"optimizer": config, "scheduler": None}}, {"x": [param]}, schedule), param


def descend(rule: ScalingRule, batch: int, gradients: Tensor) -> Tensor:
    """Return the parameters after Adam's steps on [images, N] gradients, each step seeing the mean of `batch` of
    them."""
    optimizers, param = make(rule, batch, AdamOptimizerConfig(lr=1e-3, eps=1e-15), gradients.shape[1])
    for start in range(0, len(gradients), batch):
        param.grad = gradients[start : start + batch].mean(0)
        optimizers.optimizers["x"].step()
    return param.detach()


@pytest.mark.parametrize("batch", [2, 4, 16])
def test_noisy_gradients_lead_a_batch_where_they_lead_its_images(batch: int) -> None:
    gradients = 0.05 + torch.randn(640, 4000, generator=torch.Generator().manual_seed(0))
    one, scaled, plain = (
        descend("sqrt", 1, gradients),
        descend("sqrt", batch, gradients),
        descend("none", batch, gradients),
    )
    assert float(scaled.mean()) == pytest.approx(float(one.mean()), rel=0.05)
    assert float(scaled.std()) == pytest.approx(float(one.std()), rel=0.1)
    assert float(plain.mean()) == pytest.approx(float(one.mean()) / batch**0.5, rel=0.15)


def test_parameters_of_single_views_follow_too() -> None:
    """A pose gets a gradient once an epoch, and 1/B of it: the rule holds for it as for points."""
    views, epochs, batch = 32, 40, 4
    gradients = torch.zeros(views * epochs, views)
    gradients[torch.arange(views * epochs), torch.arange(views).repeat(epochs)] = 1.0
    one, scaled = descend("sqrt", 1, gradients), descend("sqrt", batch, gradients)
    torch.testing.assert_close(scaled[: views // 2], one[: views // 2], rtol=0.12, atol=0)


def test_clipping_sees_the_parameters_of_now() -> None:
    config = AdamOptimizerConfig(lr=1e-3, max_norm=0.5)
    for batch in (1, 4):
        optimizers, old = make("sqrt", batch, config, 3)
        new = torch.nn.Parameter(torch.zeros(5))
        optimizers.optimizers["x"].param_groups[0]["params"] = [new]  # what densification does
        new.grad = torch.full((5,), 10.0)
        optimizers.optimizer_step_all()
        assert float(new.grad.norm()) == pytest.approx(0.5 / batch**0.5, rel=1e-4)
        assert bool((new != 0).all()) and not bool(old.any())


@pytest.mark.parametrize("scheduler", [None, ExponentialDecaySchedulerConfig(lr_final=1e-5, max_steps=60)])
@pytest.mark.parametrize("rule", ["sqrt-to-none", "sqrt", "linear", "none"])
def test_noise_is_that_of_one_views_rate(rule: ScalingRule, scheduler: Any) -> None:
    def rates(batch: int) -> list[float]:
        config = {"x": {"optimizer": AdamOptimizerConfig(lr=1e-3), "scheduler": scheduler}}
        schedule = RateSchedule(rule, batch, 48, at_end=0.1)
        optimizers = BatchOptimizers(config, {"x": [torch.nn.Parameter(torch.zeros(3))]}, schedule)
        found = [optimizers.rate_of_one_view("x")]
        for _ in range(48 // batch):
            optimizers.optimizers["x"].step()
            for one in optimizers.schedulers.values():
                one.step()
            found.append(optimizers.rate_of_one_view("x"))
        return found

    assert rates(4) == pytest.approx(rates(1)[::4], rel=1e-9)


def test_optimizers_that_cannot_follow_a_batch() -> None:
    config = OptimizerConfig(_target=_Descent)
    make("sqrt", 1, config, 3)
    make("none", 4, config, 3)
    with pytest.raises(InputError, match=r"_Descent cannot follow a batch of 4 views.*--batch-scaling none"):
        make("sqrt", 4, config, 3)


class _Descent(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, eps: float) -> None:
        super().__init__(params, lr=lr)


def test_refused_before_training() -> None:
    checks.check_precision(False, False)
    for asked, flag in (((True, False), "--mixed-precision"), ((False, True), "--use-grad-scaler")):
        with pytest.raises(InputError, match=flag):
            checks.check_precision(*asked)
    checks.check_cap(10, "mcmc", 10)
    checks.check_cap(11, "default", 10)
    with pytest.raises(InputError, match=r"11 Gaussians, more than --pipeline.model.max-gaussians 10"):
        checks.check_cap(11, "mcmc", 10)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Any]]]:
    """Return the schedule of training by image: refinements, and each image's harmonics and downscaling."""
    record: dict[str, list[Any]] = {"refined": [], "clock": []}
    refine, training_views = ReplicatedDensifier._refine, SplatModel.training_views

    def spy_refine(self: ReplicatedDensifier, params: Any, optimizers: Any, state: Any, image: int) -> None:
        record["refined"].append(image)
        refine(self, params, optimizers, state, image)

    def spy_views(self: SplatModel, cameras: Any, indices: Any) -> Any:
        settings = (self.primitive(depth=False).sh_degree, self._get_downscale_factor())
        record["clock"] += [(index, *settings) for index in indices]
        return training_views(self, cameras, indices)

    monkeypatch.setattr(ReplicatedDensifier, "_refine", spy_refine)
    monkeypatch.setattr(SplatModel, "training_views", spy_views)
    yield record


@pytest.mark.slow
def test_all_clocks_count_images(tmp_path: Path, seen: dict[str, list[Any]]) -> None:
    write_capture(tmp_path / "capture")
    falling = {**SMALL, "batch_scaling": "sqrt-to-none", **SAME_ORDER}
    outcomes: list[tuple[Any, ...]] = []
    for batch in (1, 2, 4):
        seen["refined"].clear()
        seen["clock"].clear()
        trainer = follow(
            World.single(), tmp_path / "capture", tmp_path / f"batch-{batch}", falling, IMAGES // batch, batch
        )
        # They end as one view's.
        rates = {n: o.param_groups[0]["lr"] for n, o in trainer.optimizers.optimizers.items()}
        outcomes.append((list(seen["refined"]), list(seen["clock"]), rates))
    assert outcomes[0][0] == [16, 40]
    assert {clock[1:] for clock in outcomes[0][1]} == {(0, 2), (1, 2), (1, 1), (2, 1), (3, 1)}
    for outcome in outcomes[1:]:
        assert outcome[:2] == outcomes[0][:2]
        assert outcome[2] == pytest.approx(outcomes[0][2])


@pytest.mark.slow
def test_a_scaled_batch_stays_nearer_to_one_view_a_step(tmp_path: Path) -> None:
    write_capture(tmp_path / "capture")
    still = {**SMALL, MODEL + "warmup_length": 10**6, MODEL + "reset_alpha_every": 10**6, **SAME_ORDER}

    def train_batches(batch: int, rule: ScalingRule) -> dict[str, Tensor]:
        options = {**still, "batch_scaling": rule}
        folder = tmp_path / f"{rule}-{batch}"
        trainer = follow(World.single(), tmp_path / "capture", folder, options, IMAGES // batch, batch)
        return {name: value.detach() for name, value in trainer.pipeline.model.gauss_params.items()}

    one, scaled, plain = train_batches(1, "sqrt"), train_batches(4, "sqrt"), train_batches(4, "none")
    for name in ("means", "opacities", "scales", "features_dc"):
        near, far = (float((other[name] - one[name]).norm()) for other in (scaled, plain))
        assert near < 0.75 * far, (name, near, far)


def three_or_one(world: World, folder: Path) -> list[dict[str, Tensor]]:
    """Train with three views a step, with growth by either densifier and a view that sees nothing."""
    outcomes = []
    for number, options in enumerate(({}, MCMC)):
        options = {**SMALL, MODEL + "num_downscales": 0, **options}
        runs = folder / f"{world.size}-{number}"
        trainer = follow(world, folder / "capture", runs, options, IMAGES // 3, 3 // world.size)
        outcomes.append({n: p.detach() for n, p in trainer.pipeline.model.named_parameters()})
    return outcomes


@pytest.mark.slow
def test_three_workers_follow_one(tmp_path: Path) -> None:
    write_capture(tmp_path / "capture")
    expected = three_or_one(World.single(), tmp_path)
    for outcomes in run_ranks(three_or_one, 3, tmp_path):
        for outcome, wanted in zip(outcomes, expected, strict=True):
            assert len(outcome["gauss_params.means"]) not in (0, 60)
            for name, value in wanted.items():
                torch.testing.assert_close(outcome[name], value, rtol=1e-7, atol=1e-8)


@pytest.mark.slow
def test_gradients_exist_where_nothing_is_seen(tmp_path: Path) -> None:
    """One rank must update what several do: they exchange zeros, and Adam counts steps."""
    write_capture(tmp_path / "capture")
    trainer = follow(World.single(), tmp_path / "capture", tmp_path / "runs", SMALL, 1, 2)
    model = trainer.pipeline.model
    model.float()
    with torch.no_grad():
        model.gauss_params["means"] += 1e4
    trainer.pipeline.datamanager.train_cameras_on_device.camera_to_worlds = (
        trainer.pipeline.datamanager.train_cameras_on_device.camera_to_worlds.float()
    )
    trainer.optimizers.zero_grad_all()
    _, losses, _ = trainer.pipeline.get_train_loss_dict(1)
    sum(losses.values(), torch.zeros(())).backward()
    for name, value in model.gauss_params.items():
        assert value.grad is not None and not bool(value.grad.any()), name
