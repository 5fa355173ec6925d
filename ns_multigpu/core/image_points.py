"""Positions of points in a view's image."""

import torch
from torch import Tensor

from cuda_ext.reference.projection import is_lens, lens_map
from ns_multigpu.core.types import View


def image_points(view: View, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pixels x and y, and the depths, of points in a view [N]; pixels are NaN where its lens draws none.

    Args:
        points: [N, 3] world units, of the dtype and on the device of the view's tensors.
    """
    K, seen = view.K, points @ view.viewmat[:3, :3].T + view.viewmat[:3, 3]
    if not is_lens(K[None]):
        depth = seen[:, 2]
        return seen[:, 0] / depth * K[0, 0] + K[0, 2], seen[:, 1] / depth * K[1, 1] + K[1, 2], depth
    image, _, depth, drawn = lens_map(K[None, 3:].expand(len(seen), 4, 3), seen)
    x, y = torch.where(drawn[:, None], image, torch.nan).unbind(-1)
    return x * K[0, 0] + K[0, 2], y * K[1, 1] + K[1, 2], depth
