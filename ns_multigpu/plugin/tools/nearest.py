"""Nearest training photograph of each frame, shown next to it."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor
from torch.nn.functional import interpolate, pad

from ns_multigpu.plugin.tools.shots import Shots

_TURN, _WAY = 0.3, 0.7
"""Weights of rotation and distance, as in ns-render."""


def nearest_views(frames: Cameras, views: Cameras) -> list[int]:
    """Return the index of the view that is nearest to each frame.

    The measure is ns-render's: 0.7 times the distance of the positions, in scene units, and 0.3 times 1 - (q . p)^2 of
    the rotations' quaternions, which is sin^2 of half the angle between them.

    Args:
        frames, views: cameras; at least one view.

    Returns:
        a view index per frame; the first of equally near views.
    """
    there, here = views.camera_to_worlds.double().cpu(), frames.camera_to_worlds.double().cpu()
    distances = torch.cdist(here[:, :, 3], there[:, :, 3])
    traces = torch.einsum("fij,vij->fv", here[:, :, :3], there[:, :, :3])
    turns = ((3.0 - traces) / 4.0).clamp(min=0.0)  # the trace of a rotation is 1 + 2 cos(angle)
    return (_WAY * distances + _TURN * turns).argmin(1).tolist()


def with_nearest(shots: Shots, dataset: Any) -> Shots:
    """Return the same frames, each with its nearest training photograph as `image`.

    Args:
        dataset: the training views, as nerfstudio holds them.
    """
    cameras = [shot.camera for shot in shots.frames]
    poses = torch.cat([camera.camera_to_worlds.reshape(1, 3, 4) for camera in cameras])
    found = nearest_views(Cameras(poses, fx=1.0, fy=1.0, cx=1.0, cy=1.0, width=1, height=1), dataset.cameras)

    @lru_cache(2)  # consecutive frames often share a view
    def read(view: int) -> Tensor:
        return dataset.get_image_float32(view)[..., :3]

    return replace(shots, frames=[replace(s, image=partial(read, v)) for s, v in zip(shots.frames, found, strict=True)])


def width_next_to(dataset: Any, height: int) -> int:
    """Return the width of a photograph next to a frame of this height: even, with the first training view's aspect
    ratio.
    """
    first = dataset.cameras[0]
    return max(2, round(float(first.width.item()) / float(first.height.item()) * height / 2) * 2)


def fitted(photograph: Tensor, width: int, height: int) -> Tensor:
    """Scale a photograph [h, w, 3] in [0, 1] to fit a picture [height, width, 3] uint8, with black bars if
    necessary.
    """
    h, w = photograph.shape[:2]
    scale = min(width / w, height / h)
    size = (max(1, min(height, round(h * scale))), max(1, min(width, round(w * scale))))
    image = interpolate(photograph.permute(2, 0, 1)[None], size, mode="area")[0]
    left, top = (width - size[1]) // 2, (height - size[0]) // 2
    image = pad(image, (left, width - size[1] - left, top, height - size[0] - top))
    return (image.permute(1, 2, 0).clamp(0.0, 1.0) * 255.0 + 0.5).to(torch.uint8)
