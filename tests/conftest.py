"""What holds for all tests."""

import signal
from collections.abc import Iterator

import pytest
import torch

from ns_multigpu.core.world import World

# A shell without job control starts what runs in the background with Ctrl-C ignored, and children inherit that: tests
# that press it would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_FROM_ENV = World.__dict__["from_env"]


@pytest.fixture(autouse=True)
def _the_environments_world() -> Iterator[None]:
    """Some tests put a world of theirs in the place of the environment's: it does not outlive them."""
    yield
    World.from_env = _FROM_ENV  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `gpu`, saying why, on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
