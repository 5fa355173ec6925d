"""Ranks of tests: what they begin with. A server that fails to import says nothing; the whole suite is merely slow."""

import os
import sys

import pytest

from ns_multigpu.core.dist.world import World
from tests.lib.ranks import PRELOADED, run_ranks


def _not_there_yet(world: World) -> tuple[list[str], str | None]:
    return [name for name in PRELOADED if name not in sys.modules], os.environ.get("NS_MULTIGPU_A_TEST")


def test_ranks_start_with_imports_and_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("one", "another"):  # the server that forks them has started by the second time
        monkeypatch.setenv("NS_MULTIGPU_A_TEST", word)
        assert run_ranks(_not_there_yet, 2) == [([], word)] * 2
