"""Normal map loss: difference between rendered normals and those of a view's map.

The formula is that of Huang et al. 2024 ("2D Gaussian Splatting", section 5), with the map's normal instead of the
depth's: the mean over the map's pixels of 1 - <N, n>. N is the rendered normal of 2D Gaussians. For other primitives it
is the normal of the drawn depth, times alpha, which needs no additional rendering.
"""

import torch
from torch import Tensor

from cuda_ext.reference.projection import is_lens
from ns_multigpu.core.image_points import pixel_rays
from ns_multigpu.core.step.depth_loss import in_patch, keypoints
from ns_multigpu.core.types import Pixels, View


def normals_of_depth(depth: Tensor, view: View, corner: tuple[int, int]) -> Tensor:
    """Return the normals of the surface that a depth image is of, by differences over two pixels.

    Args:
        depth: [h, w, 1] drawn depth of a rectangle of the view, world units; see `core.image_points`.
        corner: (x0, y0), where the rectangle begins, in pixels of the view.

    Returns:
        [h, w, 3] unit normals in world space, towards the camera; zero on the rectangle's border, and next to pixels
        that the lens does not draw.
    """
    height, width = depth.shape[:2]
    x = torch.arange(width, device=depth.device, dtype=depth.dtype) + (corner[0] + 0.5)
    y = torch.arange(height, device=depth.device, dtype=depth.dtype) + (corner[1] + 0.5)
    rays = pixel_rays(view.K.to(depth.dtype), x, y)
    points = depth * rays
    down = points[2:, 1:-1] - points[:-2, 1:-1]
    across = points[1:-1, 2:] - points[1:-1, :-2]
    normals = torch.nn.functional.normalize(torch.linalg.cross(down, across), dim=-1)
    if is_lens(view.K[None]):
        drawn = rays.any(-1, keepdim=True)
        normals = normals * (drawn[2:, 1:-1] & drawn[:-2, 1:-1] & drawn[1:-1, 2:] & drawn[1:-1, :-2])
    padded = torch.nn.functional.pad(normals.permute(2, 0, 1), (1, 1, 1, 1)).permute(1, 2, 0)
    return padded @ view.viewmat[:3, :3].to(depth.dtype)


def normal_map_loss(pixels: Pixels, view: View, beyond: int = 0) -> Tensor:
    """Return a patch's share of the mean over the view's map of 1 - <drawn normal, the map's normal>, [].

    Through the alpha by which a depth's normal is weighed no gradient goes, as in `normal_loss` of 2D Gaussians. Next
    to a pixel without depth, depth has no normal.

    Args:
        pixels: with the channel "normals", or with depth and a halo of two pixels more than `beyond`, unless the patch
            is the whole view.
        view: with `normals`.
        beyond: see `depth_loss`.
    """
    patch, observed = pixels.patch, view.normals
    assert observed is not None and observed.normals is not None
    left, top, right, bottom = patch.rendered(view)
    if right <= left or bottom <= top:
        return pixels.alpha.sum() * 0.0
    drawn = pixels.extra.get("normals")
    if drawn is None:
        drawn = _of_depth(pixels, view, (left, top))
    found = keypoints(view, observed)
    x, y = found.places.long().unbind(-1)
    place = (y - top).clamp(0, bottom - top - 1) * (right - left) + (x - left).clamp(0, right - left - 1)
    known = observed.normals.to(drawn.dtype).index_select(0, observed.ids.clamp(min=0).long())
    # Not a product of matrices: that may be of lower precision on a GPU.
    known = (known[:, :, None] * view.viewmat[:3, :3].to(drawn.dtype)).sum(1)
    error = 1 - (drawn.reshape(-1, 3).gather(0, place[:, None].expand(-1, 3)) * known).sum(-1)
    return torch.where(in_patch(found, patch, beyond), error, 0.0).sum() / found.inside.sum().clamp(min=1)


def _of_depth(pixels: Pixels, view: View, corner: tuple[int, int]) -> Tensor:
    """Return the normals [h, w, 3] of the drawn depth times alpha, 0 where a neighbour has no depth: there their
    gradient may be of any size."""
    assert pixels.depth is not None
    empty = (pixels.depth.detach() <= 0).to(pixels.depth.dtype).permute(2, 0, 1)
    near = torch.nn.functional.max_pool2d(empty, 3, stride=1, padding=1).permute(1, 2, 0)
    return normals_of_depth(pixels.depth, view, corner) * (pixels.alpha.detach() * (1 - near))
