"""nerfstudio's viewer: pages that come and go at any moment, and ports that are taken."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nerfstudio.configs.base_config import ViewerConfig
from nerfstudio.viewer.viewer import Viewer
from websockets.sync.client import ClientConnection, connect

from ns_multigpu.core.dist.world import World
from tests.lib.processes import free_port, until
from tests.lib.rendering import make_pipeline, write_capture

ROOT = Path(__file__).parents[3]
CAMERA = {
    "type": "ViewerCameraMessage",
    "wxyz": (1.0, 0.0, 0.0, 0.0), "fov": 1.0, "aspect": 1.5, "look_at": (0.0, 0.0, 0.0),
    "up_direction": (0.0, 0.0, 1.0),
}  # fmt: skip


def make_viewer(folder: Path, **config: Any) -> Any:
    pipeline = make_pipeline(World.single(), write_capture(folder / "tiny"), strategy="single")
    return Viewer(ViewerConfig(**config), folder / "viewer.log", folder, pipeline, train_lock=threading.Lock())


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = make_viewer(tmp_path_factory.mktemp("viewer"), websocket_port=free_port())
    yield made
    made.viser_server.stop()


class Visitor:
    """Client with the actions of a page, without its display."""

    def __init__(self, viewer: Any) -> None:
        address = f"ws://127.0.0.1:{viewer.viser_server.get_port()}"
        self.connection: ClientConnection = connect(address, max_size=None, compression=None).__enter__()

    def look(self, x: float = 0.0) -> None:
        """Send the camera's pose."""
        self.connection.send(msgspec.msgpack.encode({**CAMERA, "position": (x, 0.0, -3.0)}))

    def sees(self, seconds: float = 60.0) -> bool:
        """Return whether an image comes."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for message in msgspec.msgpack.decode(self.connection.recv(timeout=seconds)):
                if message["type"] == "BackgroundImageMessage":
                    return True
        return False

    def vanish(self) -> None:
        """Go without a word, as a page that is closed."""
        self.connection.socket.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def test_pages_that_are_closed_while_they_are_dragged(viewer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Pages close before viser reports them as open, while they are drawn, or when they stand still."""
    for number in range(40):
        page = Visitor(viewer)
        for x in range(number % 5):
            page.look(0.01 * x)
        if number % 10 == 9:
            assert page.sees()
            page.look(1.0)
        page.vanish()
    last = Visitor(viewer)
    last.look()
    assert last.sees(), "the pages before it have left the viewer deaf"
    server = viewer.viser_server
    assert until(lambda: len(server.get_clients()) == 1 and len(viewer.render_statemachines) == 1)
    assert not server._websock_server._atomic_lock.locked()
    last.vanish()
    assert until(lambda: not server.get_clients() and not viewer.render_statemachines)
    viewer.update_scene(10)  # what a training loop does after a step
    assert "Traceback" not in capfd.readouterr().err


def test_an_error_within_atomic_gives_the_lock_back(viewer: Any) -> None:
    server = viewer.viser_server
    with pytest.raises(KeyError), server.atomic(), server.atomic():
        raise KeyError("a page that is gone")
    entered = threading.Event()

    def enter() -> None:
        with server.atomic():
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    assert entered.wait(10)


def test_messages_keep_their_order_while_the_lock_is_held(viewer: Any) -> None:
    server = viewer.viser_server._websock_server
    sent: list[Any] = []  # the viewer's own threads may have something to say, too
    usual, server.unsafe_send_message = server.unsafe_send_message, sent.append
    try:
        with viewer.viser_server.atomic():
            for number in range(3):
                server.queue_message(number)
            assert not any(isinstance(one, int) for one in sent), "they are sent together"
        assert until(lambda: [one for one in sent if isinstance(one, int)] == [0, 1, 2])
    finally:
        server.unsafe_send_message = usual


def test_failing_page_is_reported_once_and_drawn_again(viewer: Any, capfd: Any) -> None:
    model, failed = viewer.pipeline.model, list[int]()
    usual = model.get_outputs_for_camera

    def fail(*args: Any, **options: Any) -> Any:
        failed.append(1)
        if len(failed) < 3:
            raise ZeroDivisionError("nothing to see")
        return usual(*args, **options)

    model.get_outputs_for_camera = fail
    try:
        page = Visitor(viewer)
        page.look()
        assert until(lambda: len(failed) >= 1)
        while len(failed) < 3:
            page.look(0.1 * len(failed))
            time.sleep(0.2)
        assert page.sees()
    finally:
        model.get_outputs_for_camera = usual
    page.vanish()
    assert until(lambda: not viewer.render_statemachines)
    assert capfd.readouterr().out.count("nothing to see") == 1


def test_occupied_port(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        made = make_viewer(tmp_path, websocket_port_default=port)
        found = made.viser_server.get_port()
        made.viser_server.stop()
    assert found != port and f":{found}" in made.viewer_info[0] and f":{port}" not in made.viewer_info[0]
    assert f"Port {port} is in use. The viewer is at http://localhost:{found}" in capfd.readouterr().out


def test_no_thread_of_the_viewer_keeps_a_process(tmp_path: Path) -> None:
    program = (
        "import threading, viser; from ns_multigpu.plugin.render import viewer; viewer.mend()\n"
        f"server = viser.ViserServer(port={free_port()})\n"
        "begun = threading.Event()\n"
        "def hang():\n    begun.set()\n    threading.Event().wait()\n"
        "server._websock_server._thread_executor.submit(hang); begun.wait()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, timeout=120, check=True)
