"""Options that `splatfacto-aggregate` refuses, and its number of processes."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.methods import splatfacto_aggregate
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.render.team import Devices


@pytest.fixture
def config() -> Any:
    """Return a copy of the method's options."""
    return copy.deepcopy(splatfacto_aggregate.config)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("pipeline.strategy", "tile"),
        ("pipeline.model.primitive", "2dgs"),
        ("pipeline.datamanager.cache-images", "gpu"),
    ],
)
def test_what_the_device_has_no_operators_for_is_refused(config: Any, option: str, value: str) -> None:
    config.check_method()
    *parents, last = option.replace("-", "_").split(".")
    place = config
    for parent in parents:
        place = getattr(place, parent)
    setattr(place, last, value)
    with pytest.raises(InputError, match=rf"^--{option} {value}: .* Leave it out, or use splatfacto-tile\.$"):
        config.check_method()


@pytest.mark.parametrize("launcher", ["torchrun", "--machine.num-machines"])
def test_several_processes_are_refused(config: Any, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    if launcher == "torchrun":
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
    else:
        config.machine.num_machines = 2
    with pytest.raises(InputError, match="trains in one process on one machine"):
        config.check_method()


def test_one_process_has_all_visible_gpus(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(kind: str, devices: int, *_: Any) -> None:
        raise InputError(f"{kind}: {devices}")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr("ns_multigpu.plugin.run.config.checks.check_devices", stop)
    for devices, counted in ((0, 3), (2, 2)):
        config.machine.num_devices = devices
        with pytest.raises(InputError, match=f"^cuda: {counted}$"):
            config.set_timestamp()
        assert config.processes == 1


@pytest.mark.parametrize(("kind", "devices"), [("cuda", "2 GPUs"), ("cpu", "2 pretended GPUs")])
def test_the_first_line_counts_gpus_of_one_process(config: Any, kind: str, devices: str) -> None:
    config.machine.num_devices, config.machine.device_type, config.experiment_name = 2, kind, "fox"
    said = config.short_summary()
    assert said.startswith(f"splatfacto-aggregate on {devices} of one process: 30,000 images\nRun folder ")


def test_processes_that_are_asked_for_have_devices_of_their_own(config: Any) -> None:
    state = {"_model.gauss_params.means": torch.zeros(10, 3)}
    plan = [config.pipeline.team_plan(state, None, Devices("cpu", 0, None, asked)) for asked in (None, 2)]
    assert plan[0] is None and plan[1].ranks == 2
    set_world(World.single("cpu"))
    try:
        assert config.pipeline.place("cuda:1") == "cuda:1"
    finally:
        set_world(None)


@pytest.mark.slow
def test_a_refusal_is_the_last_thing_said_through_a_pipe(tmp_path: Path) -> None:
    """No server of workers is left, which would go on importing, and warning, behind the message. No library warns."""
    words = ["splatfacto-aggregate", "--machine.device-type", "cpu", "--machine.num-devices", "2", "colmap", "--data"]
    program = "import sys; sys.argv[0] = 'ns-train'; from nerfstudio.scripts.train import entrypoint; entrypoint()"
    command = [sys.executable, "-c", program, *words, str(tmp_path / "nowhere")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1 and lines[-4].startswith("Cannot start"), done.stderr
    assert "there is no such file or folder" in lines[-2] and "Warning" not in done.stderr
