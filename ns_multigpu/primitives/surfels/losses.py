"""Losses of 2D Gaussians by patch: normal consistency, depth distortion, and the losses of maps shared with other
primitives (`core.step.depth_loss`, `core.step.normal_map_loss`).

See Huang et al. 2024, section 5; the distortion is gsplat 1.4.0's, of absolute depth differences. Each is a mean over
an image's pixels or keypoints. Patches add up, and a patch's halo makes its part equal to the whole image's.
"""

from torch import Tensor

from ns_multigpu.core.step.depth_loss import depth_loss
from ns_multigpu.core.step.normal_map_loss import normal_map_loss, normals_of_depth
from ns_multigpu.core.types import Pixels, View


def normal_loss(pixels: Pixels, view: View) -> Tensor:
    """Return a patch's share [] of the image's mean of 1 - <rendered normal, normal of the depth>.

    The depth's normal is weighted by alpha, without a gradient to alpha, as in the published code. `pixels` has depth
    and the channel "normals". Its patch has a halo of at least one pixel unless it is the whole view.
    """
    assert pixels.depth is not None
    x0, y0, _, _ = pixels.patch.rendered(view)
    left, top, right, bottom = pixels.patch.inner(view)
    surface = normals_of_depth(pixels.depth, view, (x0, y0)) * pixels.alpha.detach()
    error = 1 - (pixels.extra["normals"] * surface).sum(-1)
    return error[top:bottom, left:right].sum() / (view.width * view.height)


def distortion_loss(pixels: Pixels, view: View) -> Tensor:
    """Return a patch's share [] of the image's mean distortion, from that channel of `pixels`."""
    left, top, right, bottom = pixels.patch.inner(view)
    return pixels.extra["distortion"][top:bottom, left:right].sum() / (view.width * view.height)


TERMS = {"normals": normal_loss, "distortion": distortion_loss, "depth": depth_loss, "normal_map": normal_map_loss}
"""A patch's share of a loss, by what it is of: a channel, depth, or normal maps."""
