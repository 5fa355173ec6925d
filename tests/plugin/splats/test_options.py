"""Every option of Splatfacto means the same on any number of workers.

Each row of OPTIONS is trained on 4 views a step by one worker and by two: through two densifications and an
opacity reset (MCMC: relocations, growth and noise), all parameters must follow one worker's, poses and grids included.
Replicas are compared bit by bit after every step. docs/use/options.md lists the rows of this table.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import (
    CosineDecaySchedulerConfig,
    ExponentialDecaySchedulerConfig,
    MultiStepSchedulerConfig,
)

from ns_multigpu.core.dist.world import World
from tests.lib.ranks import run_ranks
from tests.lib.training_run import POINTS, follow, write_capture

MODEL, DATA = "pipeline.model.", "pipeline.datamanager."
BATCH, STEPS, RANKS = 4, 12, (1, 2)
CAPTURES = {
    "plain": {},
    "masks": {"masks": True},
    "alpha": {"alpha": True},
    "alpha and masks": {"alpha": True, "masks": True},
    "one size": {"wide": False},
}

# Twelve steps of four images: refinement at images 16 and 40, opacity reset at 24, another harmonic every 12.
COMMON = {
    MODEL + "num_downscales": 0,
    MODEL + "warmup_length": 4,
    MODEL + "refine_every": 8,
    MODEL + "reset_alpha_every": 3,
    MODEL + "sh_degree_interval": 12,
    MODEL + "densify_grad_thresh": 0.0005,
    MODEL + "cull_alpha_thresh": 0.06,
    MODEL + "stop_screen_size_at": 0,  # on images this small every point would be too large
}
POSES = {"optimizers.camera_opt.scheduler": None}

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults (absgrad, random background, mixed sizes)": {},
    "use-absgrad False": {MODEL + "use_absgrad": False, MODEL + "densify_grad_thresh": 0.0001},
    "densifier mcmc": {
        MODEL + "densifier": "mcmc", MODEL + "max_gaussians": 64, MODEL + "mcmc_min_opacity": 0.095,
        MODEL + "noise_lr": 5e3,
    },
    "densifier mcmc, mcmc-picks gradient": {
        MODEL + "densifier": "mcmc", MODEL + "max_gaussians": 64, MODEL + "mcmc_min_opacity": 0.095,
        MODEL + "noise_lr": 5e3, MODEL + "mcmc_picks": "gradient",
    },
    "initial-opacity, initial-scale, ssim-lambda 0": {
        MODEL + "initial_opacity": 0.3, MODEL + "initial_scale": 0.5, MODEL + "ssim_lambda": 0.0,
    },
    "split-screen-size, cull-screen-size, stop-screen-size-at": {
        MODEL + "split_screen_size": 0.3, MODEL + "cull_screen_size": 0.9, MODEL + "stop_screen_size_at": 45,
    },
    "densify-size-thresh, cull-scale-thresh, stop-split-at": {
        MODEL + "densify_size_thresh": 0.08, MODEL + "cull_scale_thresh": 0.12, MODEL + "stop_split_at": 30,
    },
    "camera-optimizer SO3xR3": {MODEL + "camera_optimizer.mode": "SO3xR3", **POSES},
    "camera-optimizer SE3, batch-scaling linear": {
        MODEL + "camera_optimizer.mode": "SE3", **POSES, "batch_scaling": "linear",
    },
    "use-bilateral-grid": {
        MODEL + "use_bilateral_grid": True, MODEL + "grid_shape": (4, 4, 4),
        "optimizers.bilateral_grid.scheduler": None,
    },
    "exposure gain": {MODEL + "exposure": "gain", "optimizers.exposures.scheduler": None},
    "masks": {"capture": "masks"},
    "RGBA images, white background": {"capture": "alpha", MODEL + "background_color": "white"},
    "RGBA images with masks, resolution schedule": {
        "capture": "alpha and masks", MODEL + "num_downscales": 1, MODEL + "resolution_schedule": 20,
    },
    "background-color black, train-cameras-sampling-strategy fps": {
        MODEL + "background_color": "black", DATA + "train_cameras_sampling_strategy": "fps",
    },
    "rasterize-mode antialiased": {MODEL + "rasterize_mode": "antialiased"},
    "use-scale-regularization, max-gauss-ratio": {
        MODEL + "use_scale_regularization": True, MODEL + "max_gauss_ratio": 1.05,
    },
    "random-init, num-random, random-scale": {
        MODEL + "random_init": True, MODEL + "num_random": 50, MODEL + "random_scale": 0.7,
    },
    "sh-degree 2, images of one size": {
        "capture": "one size", MODEL + "sh_degree": 2, MODEL + "sh_degree_interval": 8,
    },
    "output-depth-during-training, color-corrected-metrics, cache-images-type float32": {
        MODEL + "output_depth_during_training": True, MODEL + "color_corrected_metrics": True,
        DATA + "cache_images_type": "float32",
    },
    "sh-degree 0, schedulers: exponential with warm-up, cosine, multi-step": {
        MODEL + "sh_degree": 0,
        "optimizers.means.scheduler": ExponentialDecaySchedulerConfig(lr_final=1e-6, max_steps=40, warmup_steps=16),
        "optimizers.scales.scheduler": CosineDecaySchedulerConfig(max_steps=60, warm_up_end=9),
        "optimizers.opacities.scheduler": MultiStepSchedulerConfig(max_steps=60, milestones=(10, 30)),
    },
    "optimizers' max-norm (gradient clipping)": {
        "optimizers.means.optimizer": AdamOptimizerConfig(lr=1.6e-4, eps=1e-7, max_norm=1e-4),
    },
    "optimizers' weight-decay, batch-scaling sqrt-to-none, rates-at-end 0.1": {
        "optimizers.features_rest.optimizer": AdamOptimizerConfig(lr=1e-3, eps=1e-7, weight_decay=0.1),
        "batch_scaling": "sqrt-to-none", "rates_at_end": 0.1,
    },
    "batch-scaling none": {"batch_scaling": "none"},
}  # fmt: skip
# This row leaves the trained parameters as they are; what it does is looked at on its own.
SILENT = "output-depth-during-training, color-corrected-metrics, cache-images-type float32"

Outcome = dict[str, Any]


def train_options(world: World, folder: Path, number: int, options: dict[str, Any]) -> Outcome:
    """Train with a row of the table, and return everything trained and what shows that the option was at work."""
    options = {**COMMON, **options}
    capture = folder / options.pop("capture", "plain").replace(" ", "-")
    trainer = follow(world, capture, folder / f"{world.size}-{number}", options, STEPS, BATCH // world.size)
    model = trainer.pipeline.model
    moments = {
        f"{name}.{key}": value
        for name, optimizer in trainer.optimizers.optimizers.items()
        for state in optimizer.state.values()
        for key, value in state.items()
    }
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    without_gradient = [name for name, value in model.named_parameters() if value.grad is None and value.numel()]
    model.float().lpips.missing = True
    return {
        "parameters": parameters,
        "moments": moments,
        "without gradient": without_gradient,
        "metrics": trainer.pipeline.get_average_eval_image_metrics(),
        "depth": model.primitive(depth=model.config.output_depth_during_training).depth,
    }


def train_all(world: World, folder: Path) -> dict[str, Outcome]:
    """Every row of the table, one after the other: starting workers costs more than training."""
    return {name: train_options(world, folder, i, options) for i, (name, options) in enumerate(OPTIONS.items())}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, list[dict[str, Outcome]]]]:
    """World size -> what each rank had in the end, by row."""
    folder = tmp_path_factory.mktemp("options")
    for name, kind in CAPTURES.items():
        write_capture(folder / name.replace(" ", "-"), **kind)
    yield {size: run_ranks(train_all, size, folder) for size in RANKS}


def close(value: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """To rounding. A missing or wrongly scaled gradient would show in the fourth digit of a parameter, or earlier."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-8 * largest, msg=lambda text: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_same_model_on_any_number_of_workers(runs: dict[int, list[dict[str, Outcome]]], name: str) -> None:
    expected = runs[1][0][name]
    count = len(expected["parameters"]["gauss_params.means"])
    assert count != POINTS, "the run must change the number of points"
    for size in RANKS[1:]:
        for outcome in (ranks[name] for ranks in runs[size]):
            assert len(outcome["parameters"]["gauss_params.means"]) == count
            assert outcome["without gradient"] == expected["without gradient"] == []
            for kind in ("parameters", "moments"):
                assert outcome[kind].keys() == expected[kind].keys()
                for key, value in expected[kind].items():
                    close(outcome[kind][key], value, key)
            assert outcome["metrics"].keys() == expected["metrics"].keys()
            for key in outcome["metrics"].keys() - {"fps", "num_rays_per_sec"}:
                assert outcome["metrics"][key] == pytest.approx(expected["metrics"][key], rel=1e-4, nan_ok=True), key


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != SILENT and OPTIONS[name]])
def test_the_option_was_at_work(runs: dict[int, list[dict[str, Outcome]]], name: str) -> None:
    base = runs[1][0][next(iter(OPTIONS))]["parameters"]
    outcome = runs[1][0][name]["parameters"]
    same = [
        key for key, value in base.items() if key in outcome and torch.equal(outcome[key], value) and value.numel() > 0
    ]
    assert "gauss_params.means" not in same


@pytest.mark.slow
def test_silent_options(runs: dict[int, list[dict[str, Outcome]]]) -> None:
    outcomes = runs[2][1]
    assert [name for name in OPTIONS if outcomes[name]["depth"]] == [SILENT]
    assert [name for name in OPTIONS if "cc_psnr" in outcomes[name]["metrics"]] == [SILENT]


def test_documented() -> None:
    """The table of docs/use/options.md has a row for each row above, in the same order, and a column for each world."""
    text = (Path(__file__).parents[3] / "docs" / "use" / "options.md").read_text(encoding="utf8")
    section = text.split("## Tested")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    header, rows = lines[0], lines[2:]
    assert header == ["option", *(f"{size} worker{'s' if size > 1 else ''}" for size in RANKS)]
    assert [row[0] for row in rows] == list(OPTIONS)
    assert all(row[1:] == ["yes"] * len(RANKS) for row in rows)
