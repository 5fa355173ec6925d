"""nerfstudio's viewer at a run's start: icons are read once, and training does not wait for the scene's pictures."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nerfstudio.viewer import viewer as stock
from nerfstudio.viewer.utils import parse_object
from nerfstudio.viewer.viewer_elements import ViewerElement
from viser import _icons

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.render import viewer, viewer_start
from ns_multigpu.primitives.registry import PRIMITIVES
from tests.lib.resuming import start
from tests.lib.training_run import write_capture
from tests.plugin.launch.test_launch import ROOT

viewer.mend()


def test_icons_are_visers_own() -> None:
    from viser._gui_api import svg_from_icon

    viewer_start._archive.cache_clear()
    assert svg_from_icon is viewer_start.icon
    for name in ("player-pause-filled", "camera"):
        with _icons.tarfile.open(_icons.ICONS_DIR / "tabler-icons.tar") as tar:
            file = tar.extractfile(f"{name}.svg")
            assert file is not None and viewer_start.icon(name) == file.read().decode()
    assert viewer_start._archive.cache_info().misses == 1


def test_ctrl_c_is_not_lost_while_icons_are_read() -> None:
    """A viewer that has lost it goes on for ever. In a process of its own: its main thread is the one that gets it."""
    program = """
import signal, time
from ns_multigpu.plugin.render import viewer_start
signal.signal(signal.SIGALRM, signal.default_int_handler)
read = viewer_start._archive.__wrapped__
read()
begin = time.perf_counter()
read()
took = time.perf_counter() - begin
for k in range(20):
    signal.setitimer(signal.ITIMER_REAL, took * (0.1 + 0.7 * k / 20))
    try:
        read()
        while signal.getitimer(signal.ITIMER_REAL)[0]:  # it was quicker this time
            time.sleep(0.001)
    except KeyboardInterrupt:
        continue
    raise SystemExit(f"the {k}. was lost")
"""
    words = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_controls_are_found_in_a_model_of_each_primitive(tmp_path: Path, primitive: str) -> None:
    """nerfstudio reads every attribute for them, also splatfacto's of parameters that convexes lack."""
    write_capture(tmp_path / "capture")
    trainer = start(World.single(), tmp_path / "capture", tmp_path, 2, primitive=primitive, densifier="default")
    assert parse_object(trainer.pipeline.model, ViewerElement, "model") == []
    assert trainer.pipeline.model.num_points == len(trainer.pipeline.model.means)


class Bare(stock.Viewer):
    """A viewer without a server."""

    def __init__(self) -> None:
        pass


def _begin(monkeypatch: pytest.MonkeyPatch, draw: Any) -> Any:
    monkeypatch.setattr(viewer_start, "_stock_init_scene", draw)
    bare: Any = Bare()
    bare.init_scene("capture", "training", None)
    return bare


def _finish() -> None:
    for thread in threading.enumerate():
        if thread.name == "pictures for the viewer":
            thread.join()


def test_viewer_starts_without_waiting_for_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    may, half = threading.Event(), threading.Event()

    def draw(self: Any, capture: Any, state: Any, held_out: Any) -> None:
        assert (capture, state, held_out) == ("capture", "training", None)
        self.camera_handles = {}
        self.camera_handles[0] = SimpleNamespace(visible=True)
        half.set()
        assert may.wait(20)
        self.camera_handles[1] = SimpleNamespace(visible=True)

    bare = _begin(monkeypatch, draw)
    assert half.wait(20) and bare.train_util == 0.9 and bare.train_state == "training"
    for key in bare.camera_handles:  # as a page's button does, while pictures load
        may.set()
        _finish()
        bare.camera_handles[key].visible = False
    assert [handle.visible for _, handle in sorted(bare.camera_handles.items())] == [False, True]


def test_the_first_thumbnail_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(self: Any, *_: Any) -> None:
        self.camera_handles = {}
        for view in range(2):
            self.camera_handles[view] = SimpleNamespace(visible=True)

    bare = _begin(monkeypatch, draw)
    _finish()
    assert [bare.camera_handles[view].visible for view in range(2)] == [False, True]


def test_a_picture_that_cannot_be_read_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(*_: Any) -> None:
        raise OSError("gone")

    _begin(monkeypatch, draw)
    _finish()
    assert "could not show all training images (OSError: gone)" in " ".join(capsys.readouterr().out.split())
