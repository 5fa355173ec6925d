"""Runs of `splatfacto-aggregate`: the model of `single`, checkpoints for other methods and from them, and pictures.

On the CPU runs are in double precision and equal. On GPUs, whose kernels are in single precision, sizes are equal.
"""

import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.configs.method_configs import all_methods

from ns_multigpu import aggregate
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.forward import Forward
from ns_multigpu.plugin.blocks.device_steps import DeviceStep
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from tests.lib.resuming import DENSIFIERS, Model, differing, everything, in_double, start
from tests.plugin.blocks.tried_steps import start_with_small_capacity

STEPS, SAVED = 20, 9
GPUS = bool(os.environ.get("NS_MULTIGPU_TEST_GPUS"))
ONE, ALL = "cuda:0" if GPUS else "cpu", "multigpu:0"
Use = Callable[..., None]


def trained(device: str, capture: Path, out: Path, **options: Any) -> DistributedTrainer:
    """Return a run of `STEPS` steps on a device, with a checkpoint in its middle."""
    method = "splatfacto-aggregate" if device == ALL else "splatfacto-batch"
    options = {"fused_steps": "never", **options}
    options |= {"steps_per_save": SAVED, "keep_checkpoints": 0, "strategy": "single"}
    if not GPUS and options["fused_steps"] == "never":  # fused ones are in single precision
        return in_double(World.single(device), capture, out, STEPS, method=method, **options)
    optimizers = copy.deepcopy(all_methods[method].optimizers)
    for group in optimizers.values():
        group["optimizer"].eps = 1e-4  # far above rounding
    trainer = start(World.single(device), capture, out, STEPS, method=method, optimizers=optimizers, **options)
    trainer.train()
    return trainer


def different(trainer: DistributedTrainer, expected: Model, tolerance: float = 1e-7) -> list[str]:
    """Return which parameters, moments, rates and statistics differ; on GPUs in shape."""
    found, wanted = ({name: value.cpu() for name, value in of.items()} for of in (everything(trainer), expected))
    return differing(found, wanted, 1e9 if GPUS else tolerance)


def shown(trainer: DistributedTrainer) -> tuple[dict[str, float], torch.Tensor]:
    """Return metrics of held-out views and a picture for a viewer's thread, as nerfstudio's commands make them."""
    set_world(None)
    config: Any = trainer.config.pipeline
    checkpoint = trainer.checkpoint_dir / f"step-{STEPS - 1:09d}.ckpt"
    config.checkpoints = checkpoint.parent
    pipeline = config.setup(device=ONE, test_mode="test")
    state = torch.load(checkpoint, weights_only=True)["pipeline"]
    assert all(value.is_cpu for value in state.values() if isinstance(value, torch.Tensor)), "for any process"
    pipeline.load_pipeline(state, STEPS - 1)
    pipeline.eval()
    camera = pipeline.datamanager.eval_camera(0)
    with ThreadPoolExecutor(1) as viewer:
        picture = viewer.submit(lambda: pipeline.model.get_outputs_for_camera(camera)["rgb"]).result()
    return pipeline.get_average_eval_image_metrics(), picture.detach()


@pytest.mark.parametrize("densifier", ["splits", "mcmc"])
def test_the_model_of_single_and_its_checkpoints(
    use: Use, capture: Path, tmp_path: Path, densifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two members train the model of one; each goes on from the other's checkpoint to the same end."""
    options = DENSIFIERS[densifier]
    if not aggregate.in_use():  # tensors of an earlier run may live on
        use(2)
    alone = trained(ONE, capture, tmp_path / "one", **options)
    together = trained(ALL, capture, tmp_path / "all", **options)
    expected = everything(alone)
    assert len(alone.pipeline.model.means) != 60, "densification has changed the points"
    assert together.pipeline.model.means.device.type == "multigpu" and min(aggregate.calls()) > 100
    assert different(together, expected) == []
    for device, other in ((ALL, alone), (ONE, together)):
        middle = other.checkpoint_dir / f"step-{SAVED:09d}.ckpt"
        resumed = trained(device, capture, tmp_path / f"resumed-{device}", load_checkpoint=middle, **options)
        assert resumed._start_step == SAVED + 1
        assert different(resumed, expected) == [], device
    metrics_alone, picture_alone = shown(alone)
    monkeypatch.setattr(Forward, "draw", lambda *_: pytest.fail("the first member alone computes fused operators"))
    metrics, picture = shown(together)
    assert picture.device.type == "multigpu" and float(picture.std()) > 0.01
    assert metrics["psnr"] == pytest.approx(metrics_alone["psnr"], abs=0.3 if GPUS else 1e-3) and metrics["psnr"] > 5
    torch.testing.assert_close(picture.cpu(), picture_alone.cpu(), atol=0.1 if GPUS else 1e-4, rtol=0)


@pytest.mark.parametrize("densifier", ["splits", "mcmc", "splits, compact", "splits, needles"])
def test_fused_steps_train_the_model_of_single(use: Use, capture: Path, tmp_path: Path, densifier: str) -> None:
    """All members take the steps, and each device goes on from the other's checkpoint to the same end."""
    name, _, more = densifier.partition(", ")
    compact = more == "compact"
    options: dict[str, Any] = {**DENSIFIERS[name], "fused_steps": "always"}
    if compact:
        options["optimizer_state"] = "compact"
    if more == "needles":
        options |= {"use_scale_regularization": True, "max_gauss_ratio": 1.1}
    if densifier == "mcmc":  # noise without relocation, whose draws another rounding of a sum would change
        options |= {
            "max_gaussians": 60,
            "mcmc_min_opacity": 1e-4,
            "noise_lr": 5e6,
            "use_bilateral_grid": True,
            "views_per_rank": 3,
        }
    else:
        options["exposure"] = "gain"
    if not aggregate.in_use():  # tensors of an earlier run may live on
        use(2)
    alone = trained(ONE, capture, tmp_path / "one", **options)
    with pytest.MonkeyPatch.context() as patch:
        start_with_small_capacity(patch)
        together = trained(ALL, capture, tmp_path / "all", **options)
    expected, step = everything(alone), together.objective.blocks.training._step
    assert isinstance(step, DeviceStep) and len(step._steps.steps) == 2
    assert len(step._made.strategies[0].assignment.work.counts) == 8, "bands follow the work of all views"
    assert (len(alone.pipeline.model.means) == 60) == (densifier == "mcmc")
    of_photographs = "model/bil_grids.grids" if densifier == "mcmc" else "model/exposures"
    assert {of_photographs, "model/camera_optimizer.pose_adjustment"} <= expected.keys()
    tolerance = 1e-2 if compact else 1e-3
    assert different(together, expected, tolerance) == []
    for device, other in ((ALL, alone), (ONE, together)):
        middle = other.checkpoint_dir / f"step-{SAVED:09d}.ckpt"
        resumed = trained(device, capture, tmp_path / f"resumed-{device}", load_checkpoint=middle, **options)
        assert different(resumed, expected, tolerance) == [], device
