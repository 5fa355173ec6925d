"""Fixtures and settings of all tests."""

import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tests.lib.ranks  # names what the server that forks ranks imports, of which there is one  # noqa: F401
from ns_multigpu.core.dist.world import World

# A shell without job control starts what runs in the background with Ctrl-C ignored, and nohup what it runs with SIGHUP
# ignored. Children inherit that: tests that press it, or hang up, would wait in vain.
for name, default in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, name), default)


_FROM_ENV = World.__dict__["from_env"]


@pytest.fixture(autouse=True, scope="session")
def _an_ffmpeg(tmp_path_factory: pytest.TempPathFactory) -> None:
    """ns-render asks for ffmpeg on PATH, also where it writes images. Where there is none: the one that imageio has."""
    if shutil.which("ffmpeg") is None and importlib.util.find_spec("imageio_ffmpeg"):
        import imageio_ffmpeg

        folder = tmp_path_factory.mktemp("ffmpeg")
        (folder / "ffmpeg").symlink_to(imageio_ffmpeg.get_ffmpeg_exe())
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="session")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small capture of images of one size once."""
    from tests.lib.training_run import write_capture

    folder = tmp_path_factory.mktemp("capture") / "tiny"
    write_capture(folder, wide=False)
    return folder


@pytest.fixture(autouse=True)
def _the_environments_world() -> Iterator[None]:
    """Yield some tests put a world of theirs in the place of the environment's: it does not outlive them."""
    yield
    World.from_env = _FROM_ENV  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu`, saying why, on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
