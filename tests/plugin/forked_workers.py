"""Workers that `run_workers` starts in a test's own process, forked from the server of ranks.

A worker that is spawned, as `run_workers` has it elsewhere than in `ns-train`, imports torch for itself: that takes it
ten times as long as what a toy then does. Tests of a process of its own are to have such workers, and do.
"""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest

from ns_multigpu.plugin.launch import launcher, worker_server
from ns_multigpu.plugin.launch.worker import worker_main
from tests.ranks import PRELOADED

_AGENTS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCH")
"""How the variables begin that the agent gives to each worker."""


def fork_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the workers of this test forked. They have the environment of this process when they are started."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    usual: Any = launcher.elastic_launch
    monkeypatch.setitem(worker_server._state, "ours", True)
    monkeypatch.setattr(launcher, "elastic_launch", lambda launch, _: _with_environment(usual(launch, _forked)))


def _with_environment(launched: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: launched(dict(os.environ), *args)


def _forked(environment: dict[str, str], *args: Any) -> None:
    agents = {name: value for name, value in os.environ.items() if name.startswith(_AGENTS)}
    os.environ.clear()
    os.environ.update({**environment, **agents})
    worker_main(*args)
