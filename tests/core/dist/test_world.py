"""GPU of a rank, and backend of collectives, with one GPU per rank and with a shared one."""

import sys
import time
from datetime import timedelta

import pytest
import torch

from ns_multigpu.core.dist.collectives import broadcast_object
from ns_multigpu.core.dist.world import SHARE_GPUS, World, backend_of, gpu_of, gpu_places
from tests.lib.ranks import run_ranks


def test_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARE_GPUS, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpu_places() == 2
    assert (backend_of("cuda"), backend_of("cpu")) == ("nccl", "gloo")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RuntimeError, match="local rank 2 has no GPU: this machine has 2"):
        World.from_env("cuda")


def test_ranks_take_turns_on_shared_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_GPUS, "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpu_places() == sys.maxsize
    assert [gpu_of(rank).index for rank in range(5)] == [0, 1, 0, 1, 0]
    assert backend_of("cuda") == "gloo", "NCCL wants a GPU for each rank"
    monkeypatch.setenv(SHARE_GPUS, "yes")
    with pytest.raises(ValueError, match="NS_MULTIGPU_SHARE_GPUS=yes: must be 1"):
        gpu_places()
    monkeypatch.setenv(SHARE_GPUS, "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu_places() == 0, "there must be one to share"


def _wait_for_a_slow_leader(world: World) -> dict[str, object]:
    outcomes = {}
    for name, patience in (("control_timeout", timedelta(seconds=60)), ("timeout", None)):
        slow = World.from_groups(world.device, timedelta(seconds=1), patience)
        if world.is_main:
            time.sleep(2.5)
        try:
            outcomes[name] = broadcast_object("at last" if world.is_main else None, 0, slow)
        except RuntimeError:
            outcomes[name] = "cancelled"
    return outcomes


def test_a_leader_may_think_longer_than_a_collective_may_take() -> None:
    """The others of `ns-multigpu render` wait while rank 0 writes a video."""
    outcomes = run_ranks(_wait_for_a_slow_leader, 2)[1]
    assert outcomes == {"control_timeout": "at last", "timeout": "cancelled"}
