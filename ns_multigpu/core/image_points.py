"""Positions of points in a view's image, and rays through its pixels."""

import torch
from torch import Tensor

from cuda_ext.reference.projection import is_lens, lens_map, lens_rays
from ns_multigpu.core.types import View


def image_points(view: View, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pixels x and y, and the depths, of points in a view [N]; pixels are NaN where its lens draws none.

    Depth is along the axis; of a fisheye and of a panorama it is the distance. Such depths are drawn.

    Args:
        points: [N, 3] world units, of the dtype and on the device of the view's tensors.
    """
    return image_of(view.K, points @ view.viewmat[:3, :3].T + view.viewmat[:3, 3])


def image_of(K: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `image_points` does, of points in camera space [N, 3], by intrinsics [3, 3] or [7, 3]."""
    if not is_lens(K[None]):
        depth = seen[:, 2]
        return seen[:, 0] / depth * K[0, 0] + K[0, 2], seen[:, 1] / depth * K[1, 1] + K[1, 2], depth
    image, _, depth, drawn = lens_map(K[None, 3:].expand(len(seen), 4, 3), seen)
    x, y = torch.where(drawn[:, None], image, torch.nan).unbind(-1)
    return x * K[0, 0] + K[0, 2], y * K[1, 1] + K[1, 2], depth


def pixel_rays(K: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the rays [h, w, 3] in camera space through pixels, to depth 1; 0 where the lens draws none.

    Args:
        K: [3, 3] or [7, 3] intrinsics. x: [w]. y: [h].
    """
    u, v = torch.broadcast_tensors((x - K[0, 2]) / K[0, 0], ((y - K[1, 2]) / K[1, 1])[:, None])
    if is_lens(K[None]):
        return lens_rays(K[3:], torch.stack([u, v], dim=-1))
    return torch.stack([u, v, torch.ones_like(u)], dim=-1)
