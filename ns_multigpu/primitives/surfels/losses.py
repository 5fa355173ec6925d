"""Losses of 2D Gaussians by patch: normal consistency, depth distortion, and the depth loss shared with other
primitives (`core.depth_loss`).

See Huang et al. 2024, section 5; the distortion is gsplat 1.4.0's, of absolute depth differences. Each is a mean over
an image's pixels or keypoints. Patches add up, and a patch's halo makes its part equal to the whole image's.
"""

import torch
from torch import Tensor

from ns_multigpu.core.step.depth_loss import depth_loss
from ns_multigpu.core.types import Pixels, View


def normals_of_depth(depth: Tensor, view: View, corner: tuple[int, int]) -> Tensor:
    """The normals of the surface that a depth image is of, by differences over two pixels.

    Args:
        depth: [h, w, 1] z-depth of a rectangle of the view, world units.
        corner: (x0, y0), where the rectangle begins, in pixels of the view.

    Returns:
        [h, w, 3] unit normals in world space, towards the camera; zero on the rectangle's border.
    """
    height, width = depth.shape[:2]
    x = torch.arange(width, device=depth.device, dtype=depth.dtype) + (corner[0] + 0.5)
    y = torch.arange(height, device=depth.device, dtype=depth.dtype) + (corner[1] + 0.5)
    K = view.K.to(depth.dtype)
    rays = torch.stack(
        [
            ((x - K[0, 2]) / K[0, 0]).expand(height, width),
            ((y - K[1, 2]) / K[1, 1])[:, None].expand(height, width),
            torch.ones_like(depth[..., 0]),
        ],
        dim=-1,
    )
    points = depth * rays
    down = points[2:, 1:-1] - points[:-2, 1:-1]
    across = points[1:-1, 2:] - points[1:-1, :-2]
    normals = torch.nn.functional.normalize(torch.linalg.cross(down, across), dim=-1)
    padded = torch.nn.functional.pad(normals.permute(2, 0, 1), (1, 1, 1, 1)).permute(1, 2, 0)
    return padded @ view.viewmat[:3, :3].to(depth.dtype)


def normal_loss(pixels: Pixels, view: View) -> Tensor:
    """A patch's share of the mean over the image of 1 - <rendered normal, normal of the depth>, [].

    The depth's normal is weighed by alpha, through which no gradient goes, as in the published code. `pixels` has the
    channel "normals" and depth; its patch has a halo of at least one pixel, unless it is the whole view.
    """
    assert pixels.depth is not None
    x0, y0, _, _ = pixels.patch.rendered(view)
    left, top, right, bottom = pixels.patch.inner(view)
    surface = normals_of_depth(pixels.depth, view, (x0, y0)) * pixels.alpha.detach()
    error = 1 - (pixels.extra["normals"] * surface).sum(-1)
    return error[top:bottom, left:right].sum() / (view.width * view.height)


def distortion_loss(pixels: Pixels, view: View) -> Tensor:
    """A patch's share of the mean over the image of the distortion, []. `pixels` has that channel."""
    left, top, right, bottom = pixels.patch.inner(view)
    return pixels.extra["distortion"][top:bottom, left:right].sum() / (view.width * view.height)


TERMS = {"normals": normal_loss, "distortion": distortion_loss, "depth": depth_loss}
"""A patch's share of a loss, by what it is of: a channel, or depth."""
