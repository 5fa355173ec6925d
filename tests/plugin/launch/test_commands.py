"""Command lines that messages suggest to users, and options with `--load-config`."""

import copy
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from nerfstudio.configs.method_configs import all_methods
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.commands import (
    OWN_LAUNCHER,
    named_config,
    resume_command,
    train_command,
    with_options,
)
from ns_multigpu.plugin.run.config import read_config
from ns_multigpu.plugin.splats.config import DistributedTrainerConfig

ONE_MACHINE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
TWO_MACHINES = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "MASTER_ADDR": "hal", "MASTER_PORT": "1234",
}  # fmt: skip
TORCHRUN = "torchrun --nproc-per-node 2 --nnodes 2 --node-rank 1 --master-addr hal --master-port 1234 -m "


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TWO_MACHINES, OWN_LAUNCHER):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        ({}, "ns-train"),
        (ONE_MACHINE, "torchrun --nproc-per-node 4 -m nerfstudio.scripts.train"),
        (TWO_MACHINES, TORCHRUN + "nerfstudio.scripts.train"),
        ({**ONE_MACHINE, OWN_LAUNCHER: "1"}, "ns-train"),
    ],
)
def test_run_restarts_with_its_options(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], start: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = ["--data", Path("/my captures/it's")]
    command = train_command("splatfacto-tile", *words)
    assert command.startswith(start + " splatfacto-tile --data ")
    assert shlex.split(command) == [*start.split(), "splatfacto-tile", "--data", "/my captures/it's"]


def test_resume_command_quotes_spaces() -> None:
    folder = Path("/my runs/fox")
    command = resume_command("splatfacto-batch", folder, folder / "my models", "--max-num-images", "60000")
    assert shlex.split(command) == [
        *("ns-train", "splatfacto-batch", "--load-config", "/my runs/fox/config.yml"),
        *("--load-dir", "/my runs/fox/my models", "--max-num-images", "60000"),
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["splatfacto-batch", "--load-config", "my run/config.yml", "--vis", "viewer"], Path("my run/config.yml")),
        (["splatfacto-batch", "--load_config", "a.yml"], Path("a.yml")),
        (["splatfacto-batch", "--vis", "viewer", "--load-config=a=b.yml"], Path("a=b.yml")),
        (["splatfacto-batch", "--load_config=a.yml"], Path("a.yml")),
        (["splatfacto-batch", "--load-dir", "models"], None),
        (["splatfacto-batch", "--load-config"], None),
    ],
)
def test_the_file_that_is_named(monkeypatch: pytest.MonkeyPatch, words: list[str], named: Path | None) -> None:
    assert named_config(words) == named
    monkeypatch.setattr(sys, "argv", ["ns-train", *words])
    assert named_config() == named


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return the config.yml of a run that was not begun with the defaults."""
    config: Any = copy.deepcopy(all_methods["splatfacto-batch"])
    config.data = config.pipeline.datamanager.data = Path("/captures/fox")
    config.output_dir, config.timestamp, config.experiment_name = tmp_path, "now", "fox"
    config.max_num_images, config.pipeline.model.sh_degree = 500, 2
    config.load_dir, config.load_step, config.start_over = Path("/earlier"), 7, True
    config.pipeline.datamanager.dataparser = ColmapDataParserConfig(downscale_factor=4)
    path = config.get_base_dir() / "config.yml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.dump(config))
    return path


def loaded_config(saved: Path, *words: str) -> Any:
    config: Any = with_options(read_config(saved), ["splatfacto-batch", "--load-config", str(saved), *words])
    assert type(config) is DistributedTrainerConfig
    return config


def test_options_with_a_file_are_applied(saved: Path) -> None:
    config = loaded_config(saved, "--max-num-images", "900", "--pipeline.views_per_rank", "3", "--load-dir=/my models")
    assert (config.max_num_images, config.pipeline.views_per_rank) == (900, 3)
    assert (config.load_dir, config.load_step) == (Path("/my models"), None)
    assert loaded_config(saved, "--start-over", "True").start_over
    assert loaded_config(saved, "--load-step", "3", "colmap", "--downscale-factor", "2").load_step == 3
    assert (
        loaded_config(saved, "colmap", "--downscale-factor", "2").pipeline.datamanager.dataparser.downscale_factor == 2
    )


def test_options_not_given_with_a_file_are_unchanged(saved: Path) -> None:
    config = loaded_config(saved, "--vis", "tensorboard")
    assert (config.max_num_images, config.pipeline.model.sh_degree, config.timestamp) == (500, 2, "now")
    assert config.pipeline.datamanager.dataparser.downscale_factor == 4
    assert config.pipeline.datamanager.data == Path("/captures/fox")
    assert config.optimizers["means"]["optimizer"].lr == 1.6e-4 and config.optimizers["means"]["scheduler"] is not None


def test_config_file_does_not_set_start_options(saved: Path) -> None:
    config = loaded_config(saved)
    assert (config.load_dir, config.load_step, config.load_checkpoint) == (None, None, None)
    assert config.start_over is False and config.load_config is None


def test_another_place_of_the_capture_is_applied(saved: Path) -> None:
    assert loaded_config(saved, "--data", "/moved/fox").pipeline.datamanager.data == Path("/moved/fox")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-num-imags", "9"), "--max-num-imags"),
        (("--max-num-images", "many"), "many"),
        (("colmap", "--downscale", "2"), "--downscale"),
    ],
)
def test_unknown_option_with_a_file_is_an_error(
    saved: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        loaded_config(saved, *words)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_another_method_than_the_files_is_refused_with_the_command(saved: Path) -> None:
    argv = ["splatfacto-tile", "--load-config", str(saved), "--vis", "viewer"]
    with pytest.raises(InputError, match="this run's method is splatfacto-batch, not splatfacto-tile") as caught:
        with_options(read_config(saved), argv)
    command = str(caught.value).splitlines()[-1].strip()
    assert shlex.split(command) == ["ns-train", "splatfacto-batch", *argv[1:]]


@pytest.mark.parametrize(
    ("text", "said"), [("a: [1, 2", "it is damaged, or no config.yml of a run"), ("a: 1", "it is not the config.yml")]
)
def test_a_file_that_is_no_runs_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.yml").write_text(text)
    with pytest.raises(InputError, match=rf"--load-config {tmp_path / 'config.yml'}: {said}"):
        read_config(tmp_path / "config.yml")


def test_the_commands_options_are_this_processes(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["ns-train", "splatfacto-batch", "--load-config", str(saved), "--max-num-images", "42"]
    monkeypatch.setattr(sys, "argv", words)
    assert with_options(read_config(saved)).max_num_images == 42
    assert sys.argv == words and "RANK" not in os.environ
