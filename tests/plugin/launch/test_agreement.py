"""Ranks that were not started alike, or cannot meet, are refused with what differs and the remedy."""

import copy
import dataclasses
import pickle
import socket
from datetime import timedelta
from pathlib import Path

import pytest

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch import ranks
from ns_multigpu.plugin.launch.agreement import check_same_start, differences, manifest_of
from ns_multigpu.plugin.launch.ranks import Ranks, agree
from tests.lib.ranks import run_ranks


@dataclasses.dataclass
class Inner:
    views_per_rank: int = 1
    data: Path = Path("/a")


@dataclasses.dataclass
class Config:
    pipeline: Inner = dataclasses.field(default_factory=Inner)
    optimizers: dict[str, object] = dataclasses.field(default_factory=lambda: {"means": {"lr": 0.1}})
    timestamp: str = "now"
    load_dir: Path | None = None
    kind: type = Inner


def test_a_manifest_holds_options_versions_and_sources() -> None:
    manifest = manifest_of(Config())
    assert manifest["option --pipeline.views-per-rank"] == "1"
    assert manifest["option --optimizers.means.lr"] == "0.1"
    assert manifest["version torch"].startswith("2.")
    assert "source ns_multigpu/plugin/launch/agreement.py" in manifest and "source strategies/batch.py" in manifest
    assert any(name.startswith("source cuda_ext/csrc/") for name in manifest)
    assert "option --timestamp" not in manifest


def test_a_manifest_of_the_real_configuration_is_the_same_after_pickling() -> None:
    from nerfstudio.configs.method_configs import all_methods

    config = all_methods["splatfacto-batch"]
    manifest = manifest_of(config)
    assert manifest == manifest_of(pickle.loads(pickle.dumps(config)))
    assert not any(" at 0x" in value for value in manifest.values())
    other = copy.deepcopy(config)
    other.machine.num_devices, other.output_dir, other.vis = 7, Path("/elsewhere"), "tensorboard"
    assert manifest_of(other) == manifest
    other.pipeline.model.sh_degree, other.machine.seed = 1, 3
    assert differences([manifest, manifest_of(other)]) == [
        "option --machine.seed: 42 on rank 0; 3 on rank 1",
        "option --pipeline.model.sh-degree: 3 on rank 0; 1 on rank 1",
    ]


def test_machine_specific_options_are_ignored() -> None:
    first = manifest_of(Config())
    assert differences([first, manifest_of(Config(Inner(data=Path("/b")), timestamp="later"))]) == []
    assert differences([first, manifest_of(Config(load_dir=Path("/c")))]) == [
        "option --load-dir: not given on rank 0; given on rank 1"
    ]


def test_all_ranks_that_differ_are_named() -> None:
    manifests = [{"version torch": "2.11.0", "source a.py": "12"}] * 2 + [{"version torch": "2.4.0"}]
    assert differences(manifests) == [
        "source a.py: 12 on ranks 0, 1; absent on rank 2",
        "version torch: 2.11.0 on ranks 0, 1; 2.4.0 on rank 2",
    ]


def _start(world: World) -> str:
    check_same_start(Config(), world)
    try:
        check_same_start(Config(Inner(views_per_rank=1 + world.rank)), world)
    except InputError as error:
        return str(error)
    return ""


def test_every_rank_refuses_different_options() -> None:
    for message in run_ranks(_start, 2):
        assert "--pipeline.views-per-rank: 1 on rank 0; 2 on rank 1" in message and "same command" in message


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return a port on which another program listens, given as the ranks' rendezvous."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ranks, "_stores", [listener])  # closed with the test
    return port


def test_a_port_in_use_is_named_with_the_remedy(taken: int) -> None:
    with pytest.raises(InputError, match=f"Port {taken} on 127.0.0.1.*in use.*--master-port {taken + 1}"):
        agree(Ranks(0, 2, 0, 2, 1), lambda _: "folder", timedelta(seconds=3))


def test_rank_that_connects_to_another_program_names_the_address(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InputError, match=f"Rank 1 cannot meet the others at 127.0.0.1:{taken}"):
        agree(Ranks(1, 2, 1, 2, 1), lambda _: "folder", timedelta(seconds=2))
