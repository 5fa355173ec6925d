"""A headless Chromium, driven through its DevTools protocol: pages as a person opens, drags and closes them."""

import base64
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.sync.client import connect

PROGRAM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
"""Path of Chromium, or None if it is missing: `apt install chromium`."""

_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --enable-unsafe-swiftshader --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --mute-audio "
    "--disable-dev-shm-usage --remote-debugging-port=0 --window-size=800,600"
)
_START = 60.0
_ANSWER = 180.0  # it draws without a GPU, maybe while other tests run
"""Seconds that Chromium may take to start on a busy machine."""


class Browser:
    """A browser that ends with its `with` block."""

    def __enter__(self) -> "Browser":
        assert PROGRAM is not None
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        command = [PROGRAM, *_FLAGS.split(), f"--user-data-dir={self._profile}", "about:blank"]
        with (Path(self._profile) / "said").open("w") as said:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        self._socket = connect(self._address(), max_size=None).__enter__()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str) -> "Page":
        """Return a new page at `url`, which has begun to load."""
        target = self.send("Target.createTarget", url=url)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, target, session)

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Has a command of the protocol carried out; returns its result."""
        with self._lock:
            number = next(self._numbers)
            message: dict[str, Any] = {"id": number, "method": method, "params": params}
            if session is not None:
                message["sessionId"] = session
            self._socket.send(json.dumps(message))
            while True:
                answer = json.loads(self._socket.recv(timeout=_ANSWER))
                if answer.get("id") == number:
                    if "error" in answer:
                        raise RuntimeError(f"{method}: {answer['error']}")
                    return answer["result"]

    def _address(self) -> str:
        said, end = Path(self._profile) / "said", time.monotonic() + _START
        while time.monotonic() < end and self._process.poll() is None:
            if found := re.search(r"DevTools listening on (ws://\S+)", said.read_text(errors="replace")):
                return found.group(1)
            time.sleep(0.1)
        self._process.kill()
        raise RuntimeError(f"Chromium did not start:\n{said.read_text(errors='replace')}")


class Page:
    """A page of a browser."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def drag(self, steps: int = 10, left: int = 300, top: int = 300, by: int = 12, pause: float = 0.02) -> None:
        """Presses the mouse, moves it to the right and lets it go."""
        self._mouse("mousePressed", left, top)
        for step in range(1, steps + 1):
            self._mouse("mouseMoved", left + by * step, top + step)
            time.sleep(pause)
        self._mouse("mouseReleased", left + by * steps, top + steps)

    def screenshot(self, path: Path) -> None:
        """Write the page to a PNG file."""
        data = self._browser.send("Page.captureScreenshot", self._session, format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self._browser.send("Runtime.evaluate", self._session, expression=script, returnByValue=True)
        return result["result"].get("value")

    def close(self) -> None:
        """Closes the page."""
        self._browser.send("Target.closeTarget", targetId=self._target)

    def _mouse(self, kind: str, x: int, y: int) -> None:
        self._browser.send(
            "Input.dispatchMouseEvent", self._session, type=kind, x=x, y=y, button="left", buttons=1, clickCount=1
        )
