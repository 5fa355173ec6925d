"""The camera path of the demo's video: a loop over the city, in the format of nerfstudio's viewer."""

import json
import math
from pathlib import Path

import numpy as np

_DOWN = math.radians(46.0)
"""Angle of the camera below the horizon, equal to that of the training views."""


def poses(half: float, height: float, frames: int) -> np.ndarray:
    """Return camera-to-world matrices [frames, 4, 4] of a closed loop (metres, z up; OpenGL axes).

    The camera turns once around while what it looks at wanders over the middle of the city.

    Args:
        half: from the city's centre to its edge, metres.
        height: above the ground, metres.
        frames: how many.
    """
    turn = np.linspace(0.0, 2 * math.pi, frames, endpoint=False)
    target = np.stack([0.35 * half * np.sin(turn), 0.25 * half * np.sin(2 * turn), np.full(frames, 8.0)], axis=1)
    flat = np.stack([np.cos(turn), np.sin(turn), np.zeros(frames)], axis=1)
    up = np.array([0.0, 0.0, 1.0])
    forward = math.cos(_DOWN) * flat - math.sin(_DOWN) * up
    right = np.cross(forward, up)
    right /= np.linalg.norm(right, axis=1, keepdims=True)
    result = np.tile(np.eye(4), (frames, 1, 1))
    result[:, :3, 0], result[:, :3, 1], result[:, :3, 2] = right, np.cross(right, forward), -forward
    result[:, :3, 3] = target - forward * ((height - 8.0) / math.sin(_DOWN))
    return result


def write(
    path: Path, transforms: Path, half: float, height: float, size: tuple[int, int], fov: float, frames: int, fps: int
) -> None:
    """Write the loop for `ns-render camera-path`.

    Args:
        path: the file to write.
        transforms: the run's dataparser_transforms.json: from metres to the model's own coordinates.
        half, height, frames: as for `poses`.
        size: width and height of the video, pixels.
        fov: horizontal field of view, degrees.
        fps: frames a second.
    """
    move = json.loads(transforms.read_text())
    world = np.vstack([np.array(move["transform"]), [0.0, 0.0, 0.0, 1.0]])
    cameras = world @ poses(half, height, frames)
    cameras[:, :3, 3] *= move["scale"]
    width, rows = size
    vertical = 2 * math.degrees(math.atan(math.tan(math.radians(fov) / 2) * rows / width))
    shots = [{"camera_to_world": one.flatten().tolist(), "fov": vertical, "aspect": width / rows} for one in cameras]
    video = {
        "camera_type": "perspective",
        "render_width": width,
        "render_height": rows,
        "fps": fps,
        "seconds": frames / fps,
        "camera_path": shots,
    }
    path.write_text(json.dumps(video), "utf8")
