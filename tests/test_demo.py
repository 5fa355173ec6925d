"""The demo's own parts: running programs behind a bar, and the camera path of its video."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from demo import camera_path
from demo.command import CommandFailed, Stages


def test_a_program_runs_with_its_output_in_a_log(tmp_path: Path) -> None:
    program = (
        "import os, time; print('\\x1b[1mhello\\x1b[0m', end=' ', flush=True); time.sleep(0.3)\n"
        "print(os.environ['WORD'], flush=True); time.sleep(0.3); print('━━━ 40%\\r━━━ 50%')"
    )
    seen: list[int] = []
    with Stages(tmp_path, {"WORD": "world"}) as stages:
        seconds = stages.run("one", "One", [sys.executable, "-c", program], lambda: seen.append(1) or (0.5, "half"))
    assert (tmp_path / "one.log").read_text() == "hello world\n"
    assert seen and 0 < seconds < 30


def test_failing_program_is_shown_with_its_last_output(tmp_path: Path) -> None:
    with Stages(tmp_path, {}) as stages, pytest.raises(CommandFailed, match=r"status 3[\s\S]*it broke"):
        stages.run("two", "Two", [sys.executable, "-c", "print('it broke'); raise SystemExit(3)"])


def test_camera_path_sees_the_city_in_model_coordinates(tmp_path: Path) -> None:
    half, height, frames, scale = 75.0, 95.0, 12, 0.01
    turn = np.array([[0.0, 1.0, 0.0, 3.0], [-1.0, 0.0, 0.0, 4.0], [0.0, 0.0, 1.0, 5.0]])
    (tmp_path / "transforms.json").write_text(json.dumps({"transform": turn.tolist(), "scale": scale}))
    camera_path.write(tmp_path / "path.json", tmp_path / "transforms.json", half, height, (640, 480), 52.0, frames, 24)
    video = json.loads((tmp_path / "path.json").read_text())
    assert video["seconds"] == 0.5 and len(video["camera_path"]) == frames
    focal = 480 / 2 / np.tan(np.radians(video["camera_path"][0]["fov"]) / 2)
    assert focal == pytest.approx(640 / 2 / np.tan(np.radians(52.0) / 2))
    for shot in video["camera_path"]:
        c2w = np.array(shot["camera_to_world"]).reshape(4, 4)
        back = np.linalg.inv(np.vstack([turn, [0, 0, 0, 1]]))
        position = back[:3, :3] @ (c2w[:3, 3] / scale) + back[:3, 3]
        ahead = back[:3, :3] @ -c2w[:3, 2]
        assert np.linalg.det(c2w[:3, :3]) == pytest.approx(1.0)
        assert position[2] == pytest.approx(height)
        ground = position + ahead * (position[2] / -ahead[2])  # where the middle of the picture lies
        assert np.abs(ground[:2]).max() < 0.6 * half
