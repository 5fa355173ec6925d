"""Pixels of training views in which points of known position are seen, and random draws from them.

A share of each step's rays passes through such pixels, for the depth loss (`NerfactoXLModel`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from torch import Tensor

from ns_multigpu.core.observations import Observations
from ns_multigpu.core.step.depth_loss import keypoints
from ns_multigpu.plugin.capture.tracks import OPTION, Tracks
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.cameras import views_of
from ns_multigpu.plugin.radiance.data.held_images import DrawnPixels

_EVERY = 8
"""One ray in so many is drawn at a keypoint, evenly spaced in the batch, because samplers group rays by image."""
_PROJECTED = (CameraType.PERSPECTIVE, CameraType.FISHEYE, CameraType.EQUIRECTANGULAR)


@dataclass(frozen=True)
class Keypoints:
    """Keypoints of several images, the same on every rank.

    Attributes:
        images: [N] image index of each keypoint. at: [N] row * width + column of its pixel.
        ids: [N] rows of `points`. These three are on the host.
        points: [P, 3] positions, world units. scale: the scene's size, world units.
    """

    images: Tensor
    at: Tensor
    ids: Tensor
    points: Tensor
    scale: float

    def of_images(self, views: Sequence[int]) -> "Keypoints":
        """Return the keypoints of some images, whose indices become those in `views`."""
        place = torch.full((int(self.images.max()) + 1 if len(self.images) else 0,), -1)
        for index, view in enumerate(views):
            place[view : view + 1] = index
        return replace(self, images=place[self.images]).where(place[self.images] >= 0)

    def where(self, kept: Tensor) -> "Keypoints":
        """Return the keypoints with True in `kept` [N]."""
        return replace(self, images=self.images[kept], at=self.at[kept], ids=self.ids[kept])

    def put_into(self, pixels: DrawnPixels) -> DrawnPixels:
        """Replace every `_EVERY`-th pixel by a random keypoint, by torch's generator. Without keypoints, keep all."""
        images, which = pixels.images.clone(), pixels.which.clone()
        observed = torch.full_like(images, -1)
        if len(self.at):
            rows = slice(_EVERY - 1, None, _EVERY)
            some = torch.randint(len(self.at), observed[rows].shape)
            images[rows], which[rows], observed[rows] = self.images[some], self.at[some], self.ids[some]
        return replace(pixels, images=images, which=which, observed=observed)


def find_keypoints(tracks: Tracks, cameras: Cameras) -> Keypoints:
    """Return the keypoints of views: the pixels that contain the projections of the points that they observe.

    Args:
        tracks: of the views. cameras: the views' cameras, with the capture's poses.

    Raises:
        InputError: no projection is known for a camera.
    """
    others = {int(kind) for kind in cameras.camera_type.unique()} - {kind.value for kind in _PROJECTED}
    try:
        if others:
            raise ValueError(f"cameras of the type {', '.join(sorted(CameraType(kind).name for kind in others))}")
        views = views_of(cameras.to("cpu"))
    except ValueError as error:
        raise InputError(f"{OPTION}: points cannot be projected into the views ({error}): leave it out.") from error
    images, at, ids = list[Tensor](), list[Tensor](), list[Tensor]()
    for view, own in zip(views, tracks.ids.split(list(tracks.counts)), strict=True):
        found = keypoints(view, Observations(tracks.points, own, tracks.scale))
        x, y = found.places[found.inside].long().unbind(1)
        images.append(torch.full_like(x, view.index))
        at.append(y * view.width + x)
        ids.append(own[found.inside].long())
    return Keypoints(torch.cat(images), torch.cat(at), torch.cat(ids), tracks.points, tracks.scale)
