"""Depth loss: difference between the drawn depth at a view's keypoints and the depth of the observed points.

The formula is gsplat 1.4.0's (`examples/simple_trainer_2dgs.py`, `depth_loss`): the mean over keypoints of the absolute
difference of disparities, times the scene's size. As there, a keypoint is the point's projection, not the detected
image feature. It so follows the view's resolution, its camera and its pose. Through a lens, the observed depth is of
the kind that is drawn: along the axis, or the distance for fisheyes and panoramas (`core.image_points`).

gsplat interpolates depths between pixel centres and takes the disparity of the result. Here, disparities are
interpolated: that is exact over a plane that a pinhole camera sees, and stays bounded next to a hole.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ns_multigpu.core.image_points import image_of
from ns_multigpu.core.observations import Observations
from ns_multigpu.core.types import Patch, Pixels, View


class Keypoints(NamedTuple):
    """Positions in a view of observed points.

    Attributes:
        places: [K, 2] x and y in pixels of the view; 0 of what is not `inside`.
        depths: [K] as they are drawn, world units; 1 of what is not `inside`.
        inside: [K] bool, which are points that the camera draws, within the image.
    """

    places: Tensor
    depths: Tensor
    inside: Tensor


@torch.no_grad()
def keypoints(view: View, observed: Observations | None = None) -> Keypoints:
    """Return the keypoints of a view's observations, or of `observed`. Nothing is read back, and every rank finds the
    same."""
    observed = observed or view.observations
    assert observed is not None
    viewmat = view.viewmat
    seen = observed.points.to(viewmat.dtype).index_select(0, observed.ids.clamp(min=0).long())
    if observed.normals is None:
        # Not a product of matrices: that may be of lower precision on a GPU.
        seen = (seen[:, None] * viewmat[:3, :3]).sum(-1) + viewmat[:3, 3]
    x, y, depths = image_of(view.K.to(viewmat.dtype), seen)
    ahead = (observed.ids >= 0) & (depths > 0)
    inside = ahead & (x >= 0) & (x < view.width) & (y >= 0) & (y < view.height)
    places = torch.where(inside[:, None], torch.stack([x, y], dim=-1), 0.0)
    return Keypoints(places, torch.where(inside, depths, 1.0), inside)


def in_patch(found: Keypoints, patch: Patch, beyond: int = 0) -> Tensor:
    """Return a mask [K] of the keypoints whose pixel is in a patch, or at most `beyond` pixels outside of it."""
    x, y = found.places.floor().unbind(-1)
    left, top, right, bottom = patch.x0 - beyond, patch.y0 - beyond, patch.x1 + beyond, patch.y1 + beyond
    return found.inside & (x >= left) & (x < right) & (y >= top) & (y < bottom)


def disparities_at(pixels: Pixels, view: View, places: Tensor) -> Tensor:
    """Return a patch's disparities at positions in its view, bilinear between pixel centres.

    Args:
        pixels: with depth; where it is 0, as where nothing is drawn, the disparity is 0.
        view: the patch's.
        places: [K, 2] x and y in pixels of the view. The patch's rendered rectangle must include the next pixel on each
            side, unless the image ends there; otherwise the result is undefined.

    Returns:
        [K] 1 / depth, differentiable by the depth.
    """
    assert pixels.depth is not None
    left, top, right, bottom = pixels.patch.rendered(view)
    x = (places[:, 0] - 0.5).clamp(0, view.width - 1)
    y = (places[:, 1] - 0.5).clamp(0, view.height - 1)
    columns, rows = x.floor(), y.floor()
    right_of, below = x - columns, y - rows
    flat = pixels.depth.reshape(-1)
    found = torch.zeros_like(x)
    for down, by_row in ((0, 1 - below), (1, below)):
        row = (rows.long() + down).clamp(max=view.height - 1) - top
        for across, by_column in ((0, 1 - right_of), (1, right_of)):
            column = (columns.long() + across).clamp(max=view.width - 1) - left
            place = row.clamp(0, bottom - top - 1) * (right - left) + column.clamp(0, right - left - 1)
            depth = flat.gather(0, place)
            # Of what is chosen afterwards, no gradient may be NaN.
            disparity = torch.where(depth > 0, 1 / torch.where(depth > 0, depth, 1.0), 0.0)
            found = found + by_row * by_column * disparity
    return found


def depth_loss(pixels: Pixels, view: View, beyond: int = 0) -> Tensor:
    """Return a patch's share [] of the view's mean of |disparity drawn - disparity observed|, times the scene's size.

    The mean is over the view's keypoints. A keypoint counts for the patch that contains its pixel. The shares of
    patches that tile a view add up to the view's loss. Without keypoints the loss is 0.

    Args:
        pixels: with depth; the patch has a halo of at least one pixel more than `beyond`, unless it is the whole view.
        view: with observations; no gradient flows to it but through the depth.
        beyond: pixels around the patch whose keypoints count, too. With 1, gradients of the patch's own pixels are
            those of the whole view's loss.
    """
    patch, observed = pixels.patch, view.observations
    assert pixels.depth is not None and observed is not None
    left, top, right, bottom = patch.rendered(view)
    if right <= left or bottom <= top:
        return pixels.depth.sum() * 0.0
    found = keypoints(view)
    error = (disparities_at(pixels, view, found.places) - 1 / found.depths).abs()
    total = torch.where(in_patch(found, patch, beyond), error, 0.0).sum()
    return observed.scale * total / found.inside.sum().clamp(min=1)
