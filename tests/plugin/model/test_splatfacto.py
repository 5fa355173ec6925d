"""`splatfacto-batch` on one worker goes the way of nerfstudio's own `splatfacto`.

Both train on a tiny capture, from the same start, with the same views, backgrounds and noise in the same order.
gsplat's rasterizer needs a GPU, so our CPU operators draw for both (see `stock_splatfacto`). The rest is each side's
own: clocks, schedules, cameras, targets, losses, optimizers, and all of densification, with what it counts as seen.

Without refinement the bits are the same, if the loss is too. Splits rotate their noise in another order of operations,
and SSIM is summed in another. So complete runs are in double precision: differences by rounding are below 1e-11, and
differences by a rule are far above the tolerance.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from nerfstudio.configs.method_configs import all_methods
from nerfstudio.engine.trainer import Trainer
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.methods import splatfacto_batch
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from tests.lib.stock_splatfacto import STATISTICS, StockRun, follow_stock
from tests.lib.training_run import follow, write_capture

STILL = {
    "warmup_length": 10**6, "refine_every": 10, "reset_alpha_every": 3,
    "num_downscales": 1, "resolution_schedule": 30, "sh_degree_interval": 20,
}  # fmt: skip
"""Everything but refinement: opacities are reset every 30 steps."""

SCHEDULE = {
    "warmup_length": 20, "refine_every": 10, "reset_alpha_every": 8, "stop_split_at": 180, "stop_screen_size_at": 140,
    "num_downscales": 1, "resolution_schedule": 60, "sh_degree_interval": 50,
    "densify_grad_thresh": 0.01, "densify_size_thresh": 0.1, "split_screen_size": 0.5,
    "cull_screen_size": 0.9, "cull_scale_thresh": 0.4, "cull_alpha_thresh": 0.06,
}  # fmt: skip
"""Every rule of refinement has its turn, and the number of Gaussians stays below a thousand."""

REFINED = [30, 40, 50, 60, 70, 100, 110, 120, 130, 140, 150]
"""Images at which SCHEDULE refines: after the warm-up, not in the pause after a reset at 80, nor from 180 on."""

OTHER_OPTIONS = {
    "rasterize_mode": "antialiased", "use_absgrad": False, "densify_grad_thresh": 0.004, "background_color": "white",
    "sh_degree": 2, "use_scale_regularization": True, "max_gauss_ratio": 1.5,
}  # fmt: skip
MORE_PARAMETERS = {"camera_optimizer": CameraOptimizerConfig(mode="SO3xR3"), "use_bilateral_grid": True}

DIFFERENT = {
    "method_name",
    *(f"{place}_target" for place in ("", "pipeline.", "pipeline.datamanager.", "pipeline.model.")),
    # Each worker keeps its share of the images, and by default not in the GPU's memory, which Gaussians need.
    "pipeline.datamanager.cache_images",
    # What the terminal shows.
    "logging.local_writer._target",
    "logging.profiler",
    # A log ends a block of fused steps.
    "logging.steps_per_log",
}
"""Settings of nerfstudio's method that ours has otherwise, on purpose."""


@dataclasses.dataclass
class Both:
    """A run by our trainer and by nerfstudio's.

    Attributes:
        ours: our trainer, after it.
        start: our parameters before it.
        refined: of each of our refinements, the step and the statistics [N] that decided it.
        stock: nerfstudio's run.
    """

    ours: DistributedTrainer
    start: dict[str, Tensor]
    refined: list[tuple[int, dict[str, Tensor]]]
    stock: StockRun


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sharing out work as small as this takes longer than doing it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def go(
    folder: Path, options: Mapping[str, Any], steps: int, *,
    eps: float, double: bool, our_loss: bool = False, fused: bool = False,
) -> Both:  # fmt: skip
    """Train both runs, ours in fused steps or not; for the other arguments see `follow_stock`."""
    write_capture(folder / "capture", wide=not fused)
    start: dict[str, Tensor] = {}
    refined: list[tuple[int, dict[str, Tensor]]] = []
    refine = ReplicatedDensifier._refine

    def spy(self: ReplicatedDensifier, params: Any, optimizers: Any, state: dict[str, Any], image: int) -> None:
        refined.append((image, {name: state[name].clone() for name in STATISTICS}))
        refine(self, params, optimizers, state, image)

    def ready(trainer: DistributedTrainer) -> None:
        start.update({n: p.detach().clone() for n, p in trainer.pipeline.model.gauss_params.items()})

    ours = {f"pipeline.model.{name}": value for name, value in options.items()}
    ours |= {f"optimizers.{name}.optimizer.eps": eps for name in splatfacto_batch.config.optimizers}
    ours["fused_steps"] = "always" if fused else "never"
    # In double precision both must divide an image's bytes by 255 alike: nerfstudio does that in single.
    ours["pipeline.datamanager.cache_images_type"] = "float32" if double else "uint8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicatedDensifier, "_refine", spy)
        trainer = follow(
            World.single(), folder / "capture", folder / "ours", ours, steps, 1, double=double, ready=ready
        )
    seed = trainer.pipeline.model.seed
    stock = follow_stock(
        folder / "capture", folder / "stock", options, steps, start, seed, eps=eps, double=double, our_loss=our_loss
    )
    return Both(trainer, start, refined, stock)


def trained(trainer: Trainer) -> dict[str, Tensor]:
    """Return all that the steps have changed: parameters, and Adam's moments, steps and rate for each."""
    found = {name: value.detach() for name, value in trainer.pipeline.model.named_parameters()}
    for name, optimizer in trainer.optimizers.optimizers.items():
        (group,) = optimizer.param_groups
        (param,) = group["params"]
        if param.numel():  # harmonics of degree 0 are none, and of these we keep no moments
            found |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
        found[f"{name}.lr"] = torch.tensor(group["lr"])
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"rasterize_mode": "antialiased"}, {"sh_degree": 0, "background_color": "black"}],
    ids=["classic", "antialiased", "plain colours"],
)
def test_the_same_bits_without_refinement(tmp_path: Path, options: dict[str, Any]) -> None:
    """In single precision and with Adam's own eps: where steps differ in one bit, they soon do in all."""
    both = go(tmp_path, {**STILL, **options}, 100, eps=1e-15, double=False, our_loss=True)
    ours, theirs = trained(both.ours), trained(both.stock.trainer)
    assert ours.keys() == theirs.keys()
    assert [name for name, value in theirs.items() if not torch.equal(ours[name], value)] == []
    assert not both.refined and not both.stock.refinements
    assert [step for step, lowered in both.stock.lowered.items() if lowered] == [30, 60, 90]


def test_the_same_start(tmp_path: Path) -> None:
    """Rotations are drawn at random, the distances to neighbours found by another tree."""
    both = go(tmp_path, STILL, 1, eps=1e-15, double=False)
    assert both.start.keys() == both.stock.start.keys()
    for name, value in both.stock.start.items():
        if name == "quats":
            torch.testing.assert_close(both.start[name].norm(dim=-1), value.norm(dim=-1))
        else:
            torch.testing.assert_close(both.start[name], value, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "options",
    [{}, OTHER_OPTIONS, {**OTHER_OPTIONS, **MORE_PARAMETERS}],
    ids=["defaults", "other ways", "poses and colours"],
)
def test_complete_run_equals_splatfacto(tmp_path: Path, options: dict[str, Any]) -> None:
    """With nerfstudio's own loss: warm-up, resolution, harmonics, refinement by every rule, resets, stop."""
    options = {**SCHEDULE, **options}
    both = go(tmp_path, options, 200, eps=1e-7, double=True)
    stock = both.stock

    # The run is the intended one: every event has happened.
    assert [r.step for r in stock.refinements] == REFINED
    for what in ("duplicated", "split", "pruned"):
        assert sum(getattr(r, what) for r in stock.refinements) > 100, what
    assert stock.lowered.keys() == {0, 80, 160}
    assert stock.lowered[80] > 100 and stock.lowered[160] > 100
    largest = torch.stack([r.statistics["radii"].max() for r in stock.refinements if r.step < 140])
    assert bool((largest > options["split_screen_size"]).any()) and bool((largest > options["cull_screen_size"]).any())
    assert bool(trained(stock.trainer)["gauss_params.features_rest"][:, -1].any())

    assert [step for step, _ in both.refined] == REFINED
    for (step, ours), theirs in zip(both.refined, stock.refinements, strict=True):
        assert len(ours["count"]) == len(theirs.statistics["count"]), f"Gaussians before step {step}'s refinement"
        # What was seen, and how large, is counted in whole numbers: of views, and of pixels by an image's side.
        for name in ("count", "radii"):
            differ = int((ours[name] != theirs.statistics[name]).sum())
            assert differ == 0, f"{name} of {differ} of {len(ours[name])} Gaussians before step {step}'s refinement"
        torch.testing.assert_close(ours["grad2d"], theirs.statistics["grad2d"], rtol=1e-8, atol=1e-8)
    ours, theirs = trained(both.ours), trained(stock.trainer)
    assert ours.keys() == theirs.keys()
    # Nerfstudio has places in bilateral grids in single precision.
    near, absolute = (1e-5, 1e-7) if options.get("use_bilateral_grid") else (1e-8, 1e-8)
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=near, atol=absolute, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_complete_fused_run_equals_splatfacto(tmp_path: Path) -> None:
    """In single precision, as they are. Rounding may one day lead to another decision: so far not in the beginning."""
    both = go(tmp_path, SCHEDULE, 200, eps=1e-7, double=False, fused=True)
    stock = both.stock
    assert [r.step for r in stock.refinements] == [step for step, _ in both.refined] == REFINED
    for (step, ours), theirs in zip(both.refined, stock.refinements, strict=True):
        assert len(ours["count"]) == pytest.approx(len(theirs.statistics["count"]), rel=0.02), step
        if step <= 70:
            # Rounding has moved a few Gaussians by then, as many as the number of threads will have it.
            for name, rtol, atol in (("count", 0.0, 0.0), ("radii", 3e-3, 1.01 / 28), ("grad2d", 1e-3, 1e-4)):
                same = torch.isclose(ours[name], theirs.statistics[name], rtol=rtol, atol=atol)  # radii: to a pixel
                assert same.float().mean() > 0.95, f"{name} before step {step}'s refinement"
            assert float(ours["grad2d"].sum()) == pytest.approx(float(theirs.statistics["grad2d"].sum()), rel=1e-3)
    assert sum(r.split for r in stock.refinements if r.step <= 70) > 100


def settings(config: Any, place: str = "") -> dict[str, Any]:
    """Return all settings in a config, by their place in it."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    if not isinstance(config, dict) or not config:
        return {place: config}
    prefix = f"{place}." if place else ""
    return {k: v for name, value in config.items() for k, v in settings(value, prefix + name).items()}


def test_the_same_settings() -> None:
    """Of everything that nerfstudio's method has a setting for, but for a few that differ on purpose."""
    ours, theirs = settings(splatfacto_batch.config), settings(all_methods["splatfacto"])
    assert theirs["optimizers.means.scheduler.max_steps"] == 30000 and "pipeline.model.cull_alpha_thresh" in theirs
    assert theirs.keys() <= ours.keys()
    assert {name for name, value in theirs.items() if ours[name] != value} == DIFFERENT
