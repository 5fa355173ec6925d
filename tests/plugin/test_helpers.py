"""nerfstudio's own commands with helpers: the same results, and no process is left whatever dies."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.render.team import GAINS_FROM, RENDER_MEMORY, RENDER_RANKS, Size, asked_for, size_for
from tests.plugin.trained_run import write_path, write_run

ROOT = Path(__file__).parents[2]
TIMING = {"num_rays_per_sec", "fps", "num_rays_per_sec_std", "fps_std"}
SPREAD = {RENDER_MEMORY: "0.0000125"}
"""Room for 12.5 kB of the 90 points of 236 bytes (they have all harmonics): two processes."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


def _start(script: str, *words: object, **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-W", "ignore", "-m", f"nerfstudio.scripts.{script}", *map(str, words)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _done(process: subprocess.Popen[str], code: int = 0) -> str:
    said = process.communicate(timeout=180)[0]
    assert process.returncode == code, said
    return said


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has collected has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _gone(pids: list[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(_runs, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(_runs, pids))


@pytest.mark.slow
def test_evaluation_with_helpers_is_that_of_one_process(run: Path, tmp_path: Path) -> None:
    """With the whole model in each process, and with a part of it."""
    cases = {"alone": {}, "whole": {RENDER_RANKS: "2"}, "parts": {RENDER_RANKS: "2", **SPREAD}}
    said, results = {}, {}
    for name, more in cases.items():
        out = tmp_path / f"{name}.json"
        process = _start(
            "eval", "--load-config", run, "--output-path", out, "--render-output-path", tmp_path / name, **more
        )
        said[name], results[name] = _done(process), json.loads(out.read_text())["results"]
    assert "holds" not in said["alone"] and "each holds all" in said["whole"] and "each holds a part" in said["parts"]
    for name in ("whole", "parts"):
        assert results[name].keys() == results["alone"].keys() >= {"psnr", "ssim", "psnr_std"}
        for key in results["alone"].keys() - TIMING:
            assert results[name][key] == pytest.approx(results["alone"][key], rel=1e-5), key
        _same_images(tmp_path / name, tmp_path / "alone", 5)


def _same_images(found: Path, expected: Path, count: int) -> None:
    names = sorted(str(file.relative_to(expected)) for file in expected.rglob("*.png"))
    assert len(names) == count and names == sorted(str(file.relative_to(found)) for file in found.rglob("*.png"))
    for name in names:
        with Image.open(found / name) as ours, Image.open(expected / name) as theirs:
            difference = np.abs(np.asarray(ours, dtype=np.int32) - np.asarray(theirs, dtype=np.int32))
            assert np.asarray(theirs).std() > 5 and difference.max() <= 1, name


@pytest.mark.slow
def test_every_mode_of_ns_render_with_helpers(run: Path, tmp_path: Path) -> None:
    path = write_path(tmp_path / "path.json", 2)
    modes = {
        "camera-path": ["--camera-path-filename", path, "--output-format", "images"],
        "interpolate": ["--interpolation-steps", "1", "--output-format", "images"],
        "spiral": ["--seconds", "0.1", "--output-format", "images"],
        "dataset": [],
    }
    for mode, words in modes.items():
        made = []
        for name, more in {"alone": {}, "parts": {RENDER_RANKS: "2", **SPREAD}}.items():
            out = tmp_path / name / mode
            common = ("--load-config", run, "--output-path", out, "--image-format", "png")
            _done(_start("render", mode, *common, *words, **more))
            made.append(out)
        count = len(list(made[0].rglob("*.png")))
        assert count >= 2, mode
        _same_images(made[1], made[0], count)


@contextlib.contextmanager
def _viewer(run: Path, helpers: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """ns-viewer, when its page is served, and its helpers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = _start("viewer.run_viewer", "--load-config", run, "--viewer.websocket-port", port,
                     **{RENDER_RANKS: str(helpers + 1)})  # fmt: skip
    pids: list[int] = []
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        pids = [pid for pid in _children(process.pid) if b"tools.helper" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(pids) == helpers, process.communicate(timeout=10)[0] if process.poll() is not None else pids
        yield process, pids
    finally:
        for pid in (process.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                if _runs(pid):
                    os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _killed(run: Path, helpers: int, victim: str) -> None:
    with _viewer(run, helpers) as (process, pids):
        if victim == "parent":
            process.kill()
            assert _gone(pids, 4.0), "helpers have outlived their parent"  # by 5 s the closed connections end them
        elif victim == "helper":
            os.kill(pids[-1], signal.SIGKILL)
            said = process.communicate(timeout=20)[0]
            assert process.returncode == 1 and f"Helper {helpers} of {helpers} was killed by SIGKILL" in said, said
            assert _gone(pids)
        else:
            process.send_signal(signal.SIGINT)
            process.wait(20)
            assert _gone(pids)


@pytest.mark.parametrize("victim", ["parent", "helper", "nobody"])
def test_nothing_is_left_whatever_dies(run: Path, victim: str) -> None:
    _killed(run, 2 if victim == "helper" else 1, victim)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "helper"])
def test_nothing_is_left_time_after_time(run: Path, victim: str) -> None:
    for _ in range(3):
        _killed(run, 1, victim)


def test_a_helper_dies_while_it_starts(run: Path) -> None:
    """Killed before it has met the others."""
    process = _start("eval", "--load-config", run, "--output-path", "/dev/null/a.json", **{RENDER_RANKS: "2"})
    helper: list[int] = []
    end = time.monotonic() + 60
    while not helper and time.monotonic() < end:
        helper = [pid for pid in _children(process.pid) if b"tools.helper" in _command(pid)]
        time.sleep(0.02)
    os.kill(helper[0], signal.SIGKILL)
    assert "Helper 1 of 1 was killed by SIGKILL" in _done(process, 1)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_how_many_processes_a_model_takes() -> None:
    gb = 1e9
    assert size_for(1000, 236, "cuda", 4, 10 * gb, None) == Size(1, True), "a small model gains nothing"
    assert size_for(GAINS_FROM, 236, "cuda", 4, 10 * gb, None) == Size(4, True)
    assert size_for(GAINS_FROM, 236, "cuda", 4, 10 * gb, 2) == Size(2, True)
    assert size_for(1000, 236, "cuda", 4, 10 * gb, 8) == Size(4, True), "no more than there are"
    assert size_for(100_000_000, 236, "cuda", 4, 10 * gb, None) == Size(4, False)
    assert size_for(10**8, 236, "cpu", 0, None, None) == Size(1, True)
    assert size_for(90, 236, "cpu", 0, 12500.0, 2) == Size(2, False)
    with pytest.raises(InputError, match=r"100,000,000 Gaussians take 23.6 GB, and 2 GPUs .* 3 are needed"):
        size_for(100_000_000, 236, "cuda", 2, 10 * gb, None)


@pytest.mark.parametrize("text", ["many", "0", "", "nan"])
def test_what_the_environment_may_say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(RENDER_RANKS, text)
    with pytest.raises(InputError, match=f"{RENDER_RANKS}={text}: give a number from 1"):
        asked_for(RENDER_RANKS, int, 1)
    monkeypatch.delenv(RENDER_RANKS)
    assert asked_for(RENDER_RANKS, int, 1) is None
