"""Initial camera of each page of the viewer: the first training view, upright.

nerfstudio 1.1.5 leaves viser's default camera, whose position does not depend on the capture. It often shows only
background.
"""

from typing import Any, NamedTuple

import torch
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.viewer import viewer as stock
from torch import Tensor
from torch.nn.functional import normalize

_MOST_POINTS = 100_000
"""Seed points used for the distance, about."""
_LEAST_DISTANCE = 0.1
"""Least distance of the point to look at. Training cameras are within [-1, 1] by default."""
_LEAST_UP = 0.1
"""Least length of the up direction in the image plane, of 1, that determines the roll of a camera."""
_MEAN_WEIGHT = 0.01
"""Weight of the views' mean up direction relative to that of being perpendicular to the views' right."""

_stock_handle_new_client = stock.Viewer.handle_new_client


class InitialCamera(NamedTuple):
    """Camera of a page in nerfstudio's world."""

    position: Tensor
    """[3]."""
    look_at: Tensor
    """[3] centre of the image and of orbits."""
    up: Tensor
    """[3] unit direction, the axis of orbits. Not parallel to the viewing direction."""
    fov: float
    """Vertical field of view, radians."""


def initial_camera(dataset: InputDataset) -> InitialCamera:
    """Return the camera of the first view, rolled so that the capture's up direction is up in the image.

    The capture's up direction is that of least squares between two: perpendicular to the right of all views, and their
    mean up direction. The latter alone tilts towards the scene if views surround only one side.

    The camera looks at the median depth of the seed points in the image's central half. Without such points, it looks
    as far as the scene box's centre is.

    Args:
        dataset: the training views, with the parser's `points3D_xyz` [N, 3] if the capture has any.
    """
    cameras = dataset.cameras
    poses = cameras.camera_to_worlds.double().cpu()
    right, view_up, back, position = poses[0].unbind(1)
    rights, mean_up = poses[:, :, 0], poses[:, :, 1].mean(0)
    spread = rights.T @ rights / len(poses)
    up = normalize(torch.linalg.solve(spread + _MEAN_WEIGHT * torch.eye(3), mean_up), dim=0)
    if torch.linalg.cross(up, back).norm() < _LEAST_UP:  # e.g. drones that look straight down
        up = view_up
    width, height = int(cameras.width[0]), int(cameras.height[0])
    extent = torch.tensor([width / float(cameras.fx[0]), height / float(cameras.fy[0])], dtype=torch.float64)
    points = dataset.metadata.get("points3D_xyz", torch.empty(0, 3))
    offsets = points[:: 1 + len(points) // _MOST_POINTS].double().cpu() - position
    depths = -offsets @ back
    across = offsets @ torch.stack([right, view_up], 1)
    depths = depths[(across.abs() < depths[:, None] * extent / 4).all(1)]
    if len(depths):
        distance = float(depths.median())
    else:
        distance = float((dataset.scene_box.get_center().double().cpu() - position).norm())
    look_at = position - max(distance, _LEAST_DISTANCE) * back
    return InitialCamera(position, look_at, up, float(2 * torch.atan(extent[1] / 2)))


def handle_new_client(self: Any, client: Any) -> None:
    """Replace nerfstudio's method, called before a page's first image: set the page's camera first.

    Args:
        client: viser's `ClientHandle` of the page.
    """
    camera, scale = initial_camera(self.pipeline.datamanager.train_dataset), stock.VISER_NERFSTUDIO_SCALE_RATIO
    with client.atomic():
        client.camera.position = (scale * camera.position).numpy()
        client.camera.up_direction = camera.up.numpy()
        client.camera.look_at = (scale * camera.look_at).numpy()
        client.camera.fov = camera.fov
    _stock_handle_new_client(self, client)
