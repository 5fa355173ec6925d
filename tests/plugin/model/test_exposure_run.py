"""Runs with `--pipeline.model.exposure`: checkpoints carry it, and who decides."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.differing_exposures import MANY, Exposures
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.model import exposures
from ns_multigpu.plugin.render import evaluation
from ns_multigpu.plugin.splats import exposure_choice
from tests.lib.resuming import differing, everything, middle_of, start, went_on
from tests.lib.training_run import TRAIN, write_capture


def begin(folder: Path, name: str, steps: int, **options: Any) -> Any:
    still = CameraOptimizerConfig(mode="off")
    options = {"exposure": "gain", "camera_optimizer": still, **options}
    return start(World.single(), folder / "capture", folder / name, steps, 2, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_capture(tmp_path / "capture", wide=False)
    return tmp_path


@pytest.mark.parametrize("fused", ["always", "never"])
def test_run_resumes_bit_for_bit(folder: Path, fused: str) -> None:
    moves = CameraOptimizerConfig(mode="SO3xR3")
    whole, resumed = went_on(partial(begin, folder), fused_steps=fused, camera_optimizer=moves)
    assert float(everything(whole)["model/camera_optimizer.pose_adjustment"].abs().amax(1).min()) > 0
    assert "model/exposures" in everything(whole) and differing(everything(whole), everything(resumed)) == []
    with pytest.raises(InputError, match=r"--pipeline\.model\.exposure"):
        begin(folder, "without", 8, load_checkpoint=middle_of(whole), fused_steps=fused, exposure="off")


def test_affine_maps_of_earlier_versions_are_dropped_to_look_and_refused_to_train() -> None:
    model = SimpleNamespace(exposures=None, config=SimpleNamespace(color_corrected_metrics=False))
    state = {"_model.exposures": torch.zeros(TRAIN, 3, 4)}
    with pytest.raises(InputError, match="this version trains gains"):
        exposures.expect(model, state, looks=False)
    exposures.expect(model, state, looks=True)
    assert state == {} and model.config.color_corrected_metrics and model.exposures is None


def test_a_model_that_is_looked_at_takes_gains_as_the_checkpoint_has_them(folder: Path) -> None:
    """A run whose own choice it was has "auto" in its config."""
    trained = begin(folder, "run", 2).pipeline
    with torch.no_grad():
        trained.model.exposures += 0.25
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    looked_at = begin(folder, "other", 2, exposure="off").pipeline
    looked_at.load_pipeline(state, 1)
    assert torch.equal(looked_at.model.exposures, trained.model.exposures)
    assert not looked_at.model.config.color_corrected_metrics, "a trainer's pipeline measures often"
    exposures.expect(looked_at.model, state, looks=True)
    assert looked_at.model.config.color_corrected_metrics
    camera, _ = looked_at.datamanager.next_train(0)
    shown = looked_at.eval().model.get_outputs(camera)["rgb"]
    with torch.no_grad():
        looked_at.model.exposures -= 0.25
    assert torch.equal(shown, looked_at.model.get_outputs(camera)["rgb"]), "what is shown has no gain"
    del state["_model.exposures"]
    looked_at.load_pipeline(state, 1)
    assert looked_at.model.exposures is None


@pytest.mark.parametrize(
    ("spread", "said"),
    [
        (2 * MANY, "so each has a correction, which is trained"),
        (MANY / 2, "so they need no correction"),
        (None, "too few seed points"),
    ],
)
def test_auto_depends_on_the_photographs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, spread: float | None, said: str
) -> None:
    found = None if spread is None else Exposures([], spread)
    monkeypatch.setattr(exposure_choice, "exposures_of", lambda *_: found)
    trainer = begin(folder, "run", 2, exposure="auto")
    assert said in " ".join(capsys.readouterr().out.split())
    assert "exposure of the photographs" in run_parts().parts
    gains = trainer.pipeline.model.exposures
    assert (gains is not None) == (spread == 2 * MANY) == ("exposures" in trainer.optimizers.optimizers)
    if gains is not None:
        trainer.train()
        assert not torch.equal(gains, torch.ones(TRAIN, 3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exposure": "off"}, "no correction (--pipeline.model.exposure off)."),
        ({"exposure": "gain"}, "a correction per photograph (--pipeline.model.exposure gain)."),
        (
            {"exposure": "auto", "use_bilateral_grid": True},
            "a bilateral grid per photograph (--pipeline.model.use-bilateral-grid True).",
        ),
    ],
)
def test_the_choice_is_printed(folder: Path, capsys: Any, options: dict[str, Any], said: str) -> None:
    model = begin(folder, "run", 2, **options).pipeline.model
    assert (model.exposures is not None) == (options["exposure"] == "gain")
    assert f"Exposure: {said}" in " ".join(capsys.readouterr().out.split())


def test_held_out_views_are_measured_with_corrected_colours_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = begin(folder, "run", 2).pipeline
    pipeline.model.lpips.missing, pipeline.model.config.color_corrected_metrics = True, True
    found, expected = pipeline.held_out_quality(10), pipeline.get_average_eval_image_metrics()
    assert (found.psnr, found.corrected) == pytest.approx((expected["psnr"], expected["cc_psnr"]), rel=1e-4)
    assert found.corrected > found.psnr + 0.1
    said = f"{found.psnr:.2f} dB (SSIM {found.ssim:.3f}; {found.corrected:.2f} dB with corrected colours)"
    assert found.described() == f"{said} on 1 held-out views"

    pipeline.model.config.color_corrected_metrics = False  # as in training

    usual, tries = evaluation.color_correct, list[int]()

    def too_large(*images: torch.Tensor) -> Any:
        tries.append(1)
        if len(tries) == 1:  # as on the GPU; then on the host
            raise torch.OutOfMemoryError
        return usual(*images)

    def fails(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(evaluation, "color_correct", too_large)
    assert pipeline.held_out_quality(10).corrected == pytest.approx(found.corrected, abs=1e-3) and len(tries) == 2
    monkeypatch.setattr(evaluation, "color_correct", fails)
    assert math.isnan(pipeline.held_out_quality(10).corrected)
    assert begin(folder, "without", 2, exposure="off").pipeline.held_out_quality(10).corrected is None


def test_two_corrections_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"exposure gain and --pipeline.model.use-bilateral-grid True both"):
        begin(folder, "both", 2, exposure="gain", use_bilateral_grid=True)
