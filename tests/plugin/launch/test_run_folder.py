"""A run's folder: what may begin in it, where it is when it was moved, and its end where nothing came of it."""

import copy
import dataclasses
import pickle
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from nerfstudio.configs.method_configs import all_methods
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.faults.signals import STOPPING_SIGNALS
from ns_multigpu.plugin.launch.launcher import WorkerLauncher
from ns_multigpu.plugin.launch.run_folder import abandoned_unless_begun, remove_unused
from ns_multigpu.plugin.run.config import read_config
from ns_multigpu.plugin.splats.config import DistributedTrainerConfig
from tests.lib import colmap_files
from tests.lib.captures import write_capture
from tests.lib.saving import steps_in, write
from tests.lib.toy import ToyConfig
from tests.plugin.launch.test_launch import environment

RUN = Path("my fox", "splatfacto-batch", "now")
MODELS = "nerfstudio_models"


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Yield a process that `ns-train` could be: without a launcher, and afterwards as it was."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NS_MULTIGPU_OPS", "reference")
    monkeypatch.setattr(sys, "argv", ["ns-train"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = {signum: signal.getsignal(signum) for signum in STOPPING_SIGNALS}
    yield monkeypatch
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_capture(tmp_path_factory.mktemp("captures") / "my fox")


def asked(capture: Path, out: Path, **options: Any) -> Any:
    """Return the configuration of a run, as `ns-train --recipe splatfacto` reads it from a command line."""
    config: Any = copy.deepcopy(all_methods["splatfacto-batch"])
    config.recipe = "splatfacto"
    config.machine.device_type, config.output_dir, config.timestamp = "cpu", out, "now"
    config.pipeline.datamanager.data = capture
    config.pipeline.model.num_downscales = 0  # images are small
    for name, value in options.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    return config


def trained(out: Path, capture: Path, *steps: int) -> Path:
    """Return a run folder with checkpoints."""
    folder = out / RUN
    folder.mkdir(parents=True)
    for step in steps:
        assert write(folder / MODELS, step) == ""
    config = asked(capture, out, experiment_name="my fox")
    (folder / "config.yml").write_text(yaml.dump(dataclasses.replace(config)))
    return folder


# ---- the capture's reconstruction ----


@pytest.mark.parametrize("words", [[], ["--colmap-path", "colmap/sparse/0"], ["--colmap_path=colmap/sparse/0"]])
def test_a_reconstruction_is_found_unless_it_is_given(
    tmp_path: Path, process: pytest.MonkeyPatch, words: list[str]
) -> None:
    process.setattr(sys, "argv", ["ns-train", "splatfacto-batch", "colmap", *words])
    config = asked(colmap_files.write_capture(tmp_path / "capture"), tmp_path / "out")
    config.pipeline.datamanager.dataparser = ColmapDataParserConfig()
    if words:
        with pytest.raises(InputError, match=r"--colmap-path colmap/sparse/0: .* give --colmap-path sparse/0"):
            config.set_timestamp()
        return
    config.set_timestamp()
    config.save_config()
    saved = read_config(next(tmp_path.rglob("config.yml")))
    for one in (config, saved):
        assert one.pipeline.datamanager.dataparser.colmap_path == Path("sparse/0")


# ---- beginning where checkpoints are ----


def test_a_run_that_would_replace_checkpoints_is_refused_with_the_command(capture: Path, tmp_path: Path) -> None:
    folder = trained(tmp_path / "my runs", capture, 3, 9)
    with pytest.raises(InputError, match=r"holds checkpoints up to step 9, .* would replace") as caught:
        asked(capture, tmp_path / "my runs").set_timestamp()
    command = next(line for line in str(caught.value).splitlines() if line.startswith("  "))
    config, models = str(folder / "config.yml"), str(folder / MODELS)
    assert shlex.split(command) == ["ns-train", "splatfacto-batch", "--load-config", config, "--load-dir", models]
    assert "--timestamp NAME" in str(caught.value) and "--start-over True" in str(caught.value)
    assert steps_in(folder / MODELS) == [3, 9]


def test_run_may_restart_resume_or_use_a_new_folder(capture: Path, tmp_path: Path, process: pytest.MonkeyPatch) -> None:
    models = trained(tmp_path, capture, 3) / MODELS
    asked(capture, tmp_path, start_over=True).set_timestamp()
    asked(capture, tmp_path, load_dir=models).set_timestamp()
    asked(capture, tmp_path, load_checkpoint=models / "step-000000003.ckpt").set_timestamp()
    asked(capture, tmp_path, timestamp="later").set_timestamp()
    process.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    asked(capture, tmp_path).set_timestamp()


def test_going_on_from_another_run_replaces_these_checkpoints_too(capture: Path, tmp_path: Path) -> None:
    trained(tmp_path, capture, 3)
    other = trained(tmp_path / "other", capture, 5) / MODELS
    for option in ({"load_dir": other}, {"load_checkpoint": other / "step-000000005.ckpt"}):
        with pytest.raises(InputError, match="up to step 3"):
            asked(capture, tmp_path, **option).set_timestamp()


@pytest.mark.parametrize("named", [True, False])
def test_a_run_resumes_with_another_capture_in_another_folder(
    capture: Path, tmp_path: Path, process: pytest.MonkeyPatch, named: bool
) -> None:
    folder, other, moved = trained(tmp_path, capture, 3), tmp_path / "other", tmp_path / "moved"
    shutil.copytree(capture, other)

    def resume(data: Path, *words: str) -> Any:
        if named:
            return loaded(
                process, folder / "config.yml", "--load-dir", str(folder / MODELS), "--data", str(data), *words
            )
        config = asked(
            data, tmp_path, load_dir=folder / MODELS, experiment_name="my fox", timestamp=("now", *words)[-1]
        )
        config.set_timestamp()
        return config

    with pytest.raises(
        InputError, match=rf"is of the capture {capture}, and the results of {other} would.* --timestamp"
    ):
        resume(other)
    for same in (capture, capture / "transforms.json"):
        assert resume(same).get_base_dir() == folder
    assert resume(other, "--timestamp", "later").get_base_dir() == folder.with_name("later")
    capture.rename(moved)
    try:
        assert resume(moved).get_base_dir() == folder, "a capture that was moved is the same"
    finally:
        moved.rename(capture)


def test_an_option_without_effect_is_named_at_the_start(
    capture: Path, tmp_path: Path, process: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process.setattr(sys, "argv", ["ns-train", "splatfacto-batch", "--pipeline.model.noise-lr", "1e5"])
    asked(capture, tmp_path).set_timestamp()
    said = "Note: --pipeline.model.noise-lr has no effect in this run: it needs --pipeline.model.densifier mcmc."
    assert said in capsys.readouterr().out


# ---- a folder that was moved ----


def loaded(process: pytest.MonkeyPatch, named: Path, *words: str) -> DistributedTrainerConfig:
    """As `ns-train splatfacto-batch --load-config NAMED WORDS` does it."""
    process.setattr(sys, "argv", ["ns-train", "splatfacto-batch", "--load-config", str(named), *words])
    config = read_config(named)
    config.set_timestamp()
    return config


@pytest.mark.parametrize("original", ["gone", "there"])
def test_run_resumes_in_its_folder(capture: Path, tmp_path: Path, process: pytest.MonkeyPatch, original: str) -> None:
    folder, moved = trained(tmp_path / "runs", capture, 3), tmp_path / "another disk" / "fox"
    shutil.copytree(folder, moved)
    if original == "gone":
        shutil.rmtree(tmp_path / "runs")
    config = loaded(process, moved / "config.yml", "--load-dir", str(moved / MODELS), "--max-num-images", "77")
    assert config.max_num_images == 77 and config.load_dir == moved / MODELS
    for one in (config, pickle.loads(pickle.dumps(config)), config.for_steps(5)):
        assert one.get_base_dir() == moved and one.get_checkpoint_dir() == moved / MODELS
    config.save_config()
    assert read_config(moved / "config.yml").max_num_images == 77
    assert (tmp_path / "runs").exists() is (original == "there")


def test_moved_run_that_would_start_over_is_refused(capture: Path, tmp_path: Path, process: pytest.MonkeyPatch) -> None:
    moved = tmp_path / "moved"
    shutil.move(trained(tmp_path / "runs", capture, 3), moved)
    with pytest.raises(InputError) as caught:
        loaded(process, moved / "config.yml", "--max-num-images", "77")
    assert f"The run folder {moved} holds checkpoints up to step 3" in str(caught.value)


def test_command_line_sets_the_run_folder(capture: Path, tmp_path: Path, process: pytest.MonkeyPatch) -> None:
    folder = trained(tmp_path, capture, 3)
    begun = loaded(process, folder / "config.yml", "--timestamp", "later")
    assert begun.get_base_dir() == folder.with_name("later")
    redirected = loaded(process, folder / "config.yml", "--output-dir", str(tmp_path / "out"))
    assert redirected.get_base_dir() == tmp_path / "out" / RUN


def test_a_file_alone_is_no_run_folder(capture: Path, tmp_path: Path, process: pytest.MonkeyPatch) -> None:
    """Its options are wanted, not its place."""
    folder = trained(tmp_path, capture)
    (tmp_path / "alone").mkdir()
    shutil.copy(folder / "config.yml", tmp_path / "alone")
    assert loaded(process, tmp_path / "alone" / "config.yml").get_base_dir() == folder


# ---- a folder in which nothing came to be ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_images": 0}, "--max-num-images 0"),
        ({"save_retry_seconds": -1.0}, "--save-retry-seconds -1"),
        ({"rates_at_end": 2.0}, "--rates-at-end 2"),
        ({"strategy": "bacth"}, "no strategy 'bacth'"),
        ({"num_devices": 10**6}, "--machine.num-devices 1000000: the workers alone"),
        ({"save_fallback_dir": Path("/proc/nowhere")}, "--save-fallback-dir /proc/nowhere cannot be written"),
    ],
)
def test_invalid_options_create_no_folder(capture: Path, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    config = asked(capture, tmp_path / "out")
    for name, value in options.items():
        place = next(one for one in (config, config.pipeline, config.machine) if hasattr(one, name))
        setattr(place, name, value)
    with pytest.raises(InputError, match=said):
        config.set_timestamp()
    assert not (tmp_path / "out").exists()


def test_a_capture_that_is_seen_to_be_wrong_makes_no_folder(tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "capture")
    (capture / "images" / "photo_03.png").unlink()
    with pytest.raises(InputError, match=r"photo_03\.png"):
        asked(capture, tmp_path / "out").set_timestamp()
    assert not (tmp_path / "out").exists()


def test_refused_run_removes_its_folder(capture: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "another" / "capture").mkdir(parents=True)
    config = asked(capture, tmp_path / "out", mixed_precision=True)
    config.set_timestamp()
    config.save_config()
    assert (tmp_path / "out" / RUN / "config.yml").exists()
    with pytest.raises(InputError, match="--mixed-precision"):
        config.setup(local_rank=0, world_size=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["another"]


def test_a_folder_that_was_there_before_stays(capture: Path, tmp_path: Path) -> None:
    (tmp_path / RUN).mkdir(parents=True)
    config = asked(capture, tmp_path)
    config.set_timestamp()
    config.abandon()
    assert (tmp_path / RUN).exists()


def test_a_run_that_has_saved_is_not_abandoned(capture: Path, tmp_path: Path) -> None:
    config = asked(capture, tmp_path)
    config.set_timestamp()
    assert write(config.get_checkpoint_dir(), 0) == ""
    config.abandon()
    assert steps_in(tmp_path / RUN / MODELS) == [0]


@pytest.mark.parametrize(("kind", "kept"), [(InputError, False), (SystemExit, False), (KeyError, True)])
def test_errors_before_the_first_step_remove_the_folder(
    capture: Path, tmp_path: Path, kind: type[BaseException], kept: bool
) -> None:
    """A mistake of ours leaves what there is, to be looked into."""
    config = asked(capture, tmp_path)
    config.set_timestamp()
    with pytest.raises(kind), abandoned_unless_begun(config):
        raise kind
    assert (tmp_path / RUN).exists() is kept


@pytest.mark.parametrize(
    ("file", "kept"),
    [
        ("dataparser_transforms.json", False),
        ("events.out.tfevents.17", False),
        ("metrics.jsonl", True),
        ("notes.txt", True),
    ],
)
def test_only_what_every_run_writes_first_is_removed(tmp_path: Path, file: str, kept: bool) -> None:
    folder = tmp_path / RUN
    folder.mkdir(parents=True)
    (folder / "config.yml").touch()
    (folder / file).touch()
    remove_unused(folder, tmp_path)
    assert folder.exists() is kept and (tmp_path / RUN.parts[0]).exists() is kept and tmp_path.exists()


def test_a_neighbour_stays(tmp_path: Path) -> None:
    for name in ("now", "later"):
        (tmp_path / RUN).with_name(name).mkdir(parents=True)
    remove_unused(tmp_path / RUN, tmp_path)
    assert not (tmp_path / RUN).exists() and (tmp_path / RUN).with_name("later").exists()


def test_the_launcher_abandons_a_run_that_its_workers_refuse(tmp_path: Path, process: pytest.MonkeyPatch) -> None:
    for name, value in environment(TOY="input").items():
        process.setenv(name, value)
    abandoned: list[int] = []
    with pytest.raises(InputError, match="no such toy"):
        WorkerLauncher(ToyConfig(str(tmp_path)), 2, lambda: abandoned.append(1)).train()
    assert abandoned == [1]


# ---- the capture's tracks ----


@pytest.mark.parametrize("depth_loss", [0.0, 0.1])
def test_a_capture_without_tracks_is_refused_where_they_are_needed(
    tmp_path: Path, process: pytest.MonkeyPatch, depth_loss: float
) -> None:
    process.setattr(sys, "argv", ["ns-train", "splatfacto-batch", "colmap"])
    config = asked(colmap_files.write_capture(tmp_path / "capture", points=1), tmp_path / "out")
    config.pipeline.datamanager.dataparser = ColmapDataParserConfig()
    config.pipeline.model.depth_loss = depth_loss
    if depth_loss == 0:
        config.set_timestamp()
        return
    with pytest.raises(InputError, match=r"--pipeline.model.depth-loss"):
        config.set_timestamp()
