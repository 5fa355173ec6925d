"""Output of a short run: the summary at its end, the suggested commands, and nerfstudio's commands on its folder."""

import copy
import dataclasses
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml
from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManager
from nerfstudio.scripts import render
from nerfstudio.utils.eval_utils import eval_setup

from ns_multigpu.plugin.capture.datamanager import DistributedDataManager
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.agreement import options_of
from ns_multigpu.plugin.launch.commands import with_options
from ns_multigpu.plugin.run.checkpoints import changed_options
from ns_multigpu.plugin.run.config import read_config
from ns_multigpu.plugin.run.terminal import say_how_it_went
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from tests.lib.resuming import start
from tests.lib.saving import ALONE
from tests.lib.training_run import write_capture

STEPS = 3
FinishedRun = tuple[DistributedTrainer, str]


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards: nerfstudio's commands have changed it."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(render, "VanillaDataManager", VanillaDataManager)


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DistributedTrainer]:
    """Set up a trainer in a new folder, whose path has spaces in it."""
    folder = tmp_path_factory.mktemp("capture")
    write_capture(folder / "tiny")
    return lambda steps=STEPS, **options: start(
        ALONE, folder / "tiny", tmp_path_factory.mktemp("my runs"), steps, **options
    )


def finish(trainer: DistributedTrainer, capfd: Any) -> str:
    """Trains; returns what was printed."""
    capfd.readouterr()
    trainer.train()
    (trainer.base_dir / "config.yml").write_text(yaml.dump(dataclasses.replace(trainer.config)))
    return capfd.readouterr().out


@pytest.fixture(scope="module")
def made(begin: Callable[..., DistributedTrainer]) -> dict[str, Any]:
    return {}


@pytest.fixture
def run(
    made: dict[str, Any], begin: Callable[..., DistributedTrainer], capfd: pytest.CaptureFixture[str]
) -> FinishedRun:
    """Return a run that has ended, and what it said; one for all tests."""
    if not made:
        trainer = begin()
        made["run"] = (trainer, finish(trainer, capfd))
    return made["run"]


def box(said: str) -> dict[str, str]:
    """Return the rows of the box, by name."""
    rows = [line.strip("│| ").split("  ", 1) for line in said.splitlines() if line.startswith(("│", "|"))]
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


def commands(said: str) -> dict[str, list[str]]:
    """Return the suggested commands by purpose."""
    found = re.findall(r"^([A-Z][^\n:]*):\n  (ns-\S+ .*)$", said, re.MULTILINE)
    return {name: shlex.split(command) for name, command in found}


def test_the_box_at_the_end(run: FinishedRun) -> None:
    trainer, said = run
    rows = box(said)
    quality = trainer.pipeline.held_out_quality(10)
    assert quality is not None and quality.total == 1
    assert rows["PSNR"] == f"{quality.psnr:.2f} dB (SSIM {quality.ssim:.3f}) on 1 held-out views"
    assert rows["Images"] == "3" and rows["Gaussians"] == f"{trainer.pipeline.model.total_points}"
    seconds = trainer.progress.seconds
    assert re.fullmatch(rf"\d+ s, {STEPS / seconds:,.0f} images a second", rows["Training"])
    assert said.index("Training finished") < said.index("PSNR")
    assert "Warning" not in rows


def test_the_box_is_also_in_a_file(run: FinishedRun) -> None:
    trainer, said = run
    summary = json.loads((trainer.base_dir / "training_summary.json").read_text())
    assert box(said)["PSNR"].startswith(f"{summary['psnr']:.2f} dB (SSIM {summary['ssim']:.3f}")
    assert (summary["held_out_views"], summary["steps"]) == (1, STEPS)


def test_next_commands_can_be_pasted(run: FinishedRun) -> None:
    trainer, said = run
    config, models = str(trainer.base_dir / "config.yml"), str(trainer.checkpoint_dir)
    assert " " in config
    assert commands(said) == {
        "Look at it": ["ns-viewer", "--load-config", config],
        "Measure it": ["ns-eval", "--load-config", config],
        "Go on, for twice as long": [
            *("ns-train", "splatfacto-batch", "--load-config", config, "--load-dir", models),
            *("--max-num-iterations", str(2 * STEPS)),
        ],
    }


def test_resume_command_resumes(run: FinishedRun, begin: Callable[..., DistributedTrainer], capfd: Any) -> None:
    trainer, said = run
    argv = commands(said)["Go on, for twice as long"][1:]
    config = with_options(read_config(trainer.base_dir / "config.yml"), argv)
    resumed = begin(config.max_num_iterations, load_dir=config.load_dir)
    finished = finish(resumed, capfd)
    assert resumed._start_step == STEPS and resumed.step == 2 * STEPS - 1
    assert box(finished)["Images"] == "6 (3 since resuming)"
    with pytest.raises(InputError, match=r"has seen 3 images, and this one is to end after 2: give more by --max-num"):
        begin(STEPS - 1, load_dir=config.load_dir)


def test_dropped_quality_is_in_the_summary(begin: Callable[..., DistributedTrainer], capfd: Any) -> None:
    trainer = begin()
    finish(trainer, capfd)
    trainer.progress.psnr.now, trainer.progress.psnr.best = 11.0, (25.0, 7)
    trainer.config.max_num_images = 30
    capfd.readouterr()
    say_how_it_went(trainer, trainer.base_dir, None)
    said = capfd.readouterr().out
    assert box(said)["Warning"] == "training's PSNR ended at 11.0 dB; its best was 25.0" and "PSNR" not in box(said)
    assert commands(said)["Go on, for twice as long"][-2:] == ["--max-num-images", "6"]


def test_fused_and_ordinary_steps_log_the_same_loss(begin: Callable[..., DistributedTrainer]) -> None:
    """Without terms of parameters, which fused steps do not compute."""
    mcmc = {"densifier": "mcmc", "max_gaussians": 80, "mcmc_opacity_reg": 0.5, "mcmc_scale_reg": 0.5, "noise_lr": 0.0}
    found = []
    for fused in ("never", "always"):
        trainer = begin(1, fused_steps=fused, background_color="black", **mcmc)
        trainer.train()
        row = json.loads((trainer.base_dir / "metrics.jsonl").read_text().splitlines()[0])
        assert ("mcmc_scale_reg" in row) == (fused == "never")
        found.append(row["loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-3)


# ---- going on with other options ----


def test_options_that_differ_from_the_checkpoints_are_listed_and_no_others(
    run: FinishedRun, begin: Callable[..., DistributedTrainer], capfd: Any
) -> None:
    capfd.readouterr()
    more = {"refine_every": 7, "ssim_lambda": 0.3, "batch_scaling": "linear"}
    begin(2 * STEPS, load_dir=run[0].checkpoint_dir, **more, steps_per_save=77, save_retry_seconds=5.0)
    said = capfd.readouterr().out
    assert said.count("Options that differ") == 1
    lines = said.partition("Options that differ")[2].splitlines()
    assert sorted(line.strip() for line in lines if line.startswith("  --")) == [
        "--batch-scaling linear (was auto)",
        f"--max-num-iterations {2 * STEPS} (was {STEPS})",
        "--pipeline.model.refine-every 7 (was 6)",
        "--pipeline.model.ssim-lambda 0.3 (was 0.2)",
    ]


def test_another_capture_is_an_option_that_differs(run: FinishedRun, tmp_path: Path, monkeypatch: Any) -> None:
    config = copy.deepcopy(run[0].config)
    before = options_of(config)
    here = Path(str(config.pipeline.datamanager.data))
    shutil.copytree(here, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    config.pipeline.datamanager.data = Path("other")
    assert changed_options(before, options_of(config))[1:] == [f"  --data {tmp_path}/other (was {here.resolve()})"]
    config.pipeline.datamanager.data, config.pipeline.datamanager.dataparser.data = None, Path()
    assert "--data" not in options_of(config), "as a city"


# ---- nerfstudio's commands ----


@pytest.fixture
def moved(run: FinishedRun, tmp_path: Path) -> Path:
    """Return a copy of the run's folder; the original is still there."""
    place = tmp_path / "another disk" / "fox"
    shutil.copytree(run[0].base_dir, place)
    return place


def test_copy_is_viewed_instead_of_its_original(run: FinishedRun, moved: Path) -> None:
    config, _, checkpoint, step = eval_setup(moved / "config.yml", test_mode="inference")
    assert checkpoint == moved / "nerfstudio_models" / f"step-{STEPS - 1:09d}.ckpt" and step == STEPS - 1
    assert config.get_base_dir() == moved
    assert eval_setup(run[0].base_dir / "config.yml", test_mode="inference")[2].parent == run[0].checkpoint_dir


def test_a_config_without_checkpoints_finds_the_originals(run: FinishedRun, moved: Path) -> None:
    shutil.rmtree(moved / "nerfstudio_models")
    assert eval_setup(moved / "config.yml", test_mode="inference")[2].parent == run[0].checkpoint_dir


def test_config_without_run_folder(moved: Path, tmp_path: Path) -> None:
    lost = read_config(moved / "config.yml")
    lost.output_dir = tmp_path / "nowhere"
    (moved / "config.yml").write_text(yaml.dump(dataclasses.replace(lost)))
    shutil.rmtree(moved / "nerfstudio_models")
    with pytest.raises(InputError, match=r"no checkpoints next to it, in .* move or copy its whole folder") as e:
        eval_setup(moved / "config.yml", test_mode="inference")
    assert str(moved / "nerfstudio_models") in str(e.value) and str(tmp_path / "nowhere") in str(e.value)


def test_a_spiral_is_rendered(moved: Path, tmp_path: Path) -> None:
    words = ["--load-config", str(moved / "config.yml"), "--output-path", str(tmp_path / "spiral")]
    tyro.cli(render.SpiralRender, args=[*words, "--output-format", "images", "--seconds", "0.125"]).main()
    assert len(list((tmp_path / "spiral").glob("*.jpg"))) == 3
    assert render.VanillaDataManager == (VanillaDataManager, DistributedDataManager)
