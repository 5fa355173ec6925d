"""The 3D Gaussian as a primitive (Kerbl et al. 2023), over the native operators."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from cuda_ext.ops.project.projection import three_sigma_radii
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.types import TILE, Hits, Patch, Pixels, Points, Splats, View, stack_intrinsics, stack_viewmats
from ns_multigpu.primitives.canvas import Canvas, clip_lists
from ns_multigpu.primitives.deterministic import rotations
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels
from ns_multigpu.primitives.gaussians.schema import SCHEMA
from ns_multigpu.primitives.radius_clip import clip_rows
from ns_multigpu.primitives.shading import row_colors

CUTOFF = (2 * math.log(255)) ** 0.5
"""Standard deviations at which exp(-d^2 / 2) is 1/255."""
_AT_ONCE = 1 << 20
"""Points whose extents are computed at once."""


@torch.no_grad()
def extents_of(points: Points, axes_of: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
    """Return `Primitive.extents` of ellipsoids beyond which an opaque point's alpha is below 1/255.

    Args:
        axes_of: of some points' parameters, returns the axes of one standard deviation, columns of [n, 3, K].
    """
    found = [points.params["means"].new_zeros(0, 3)]
    for start in range(0, len(points), _AT_ONCE):
        some = {name: value[start : start + _AT_ONCE] for name, value in points.params.items()}
        found.append(CUTOFF * axes_of(some).square().sum(-1).sqrt())
    return torch.cat(found)


@dataclass(frozen=True)
class GaussianPrimitive(Primitive):
    """Points whose rows are 2D Gaussians on the screen.

    Attributes:
        sh_degree: harmonics in use now, 0 to 3; None for plain colours.
        antialiased: scale opacities by what the screen-space blur added (Mip-Splatting's compensation).
        absgrad: the probe's gradient is the sum over pixels of |d loss / d mean2d| instead of |the sum| (AbsGS).
        depth: render expected depth as well.
        eps2d: blur added to the 2D covariance, pixels squared.
        near, far: depths beyond which nothing is drawn.
        radius_clip: half extents in pixels up to which a splat is not drawn; see `clip_rows`.
    """

    sh_degree: int | None = 3
    antialiased: bool = False
    absgrad: bool = False
    depth: bool = False
    eps2d: float = 0.3
    near: float = 0.01
    far: float = 1e10
    radius_clip: float = 0.0

    def splats(self, hits: Hits, projection: cuda_ext.Projection, colors: Tensor) -> Splats:
        """Return the rows of `splat` from their projection and colours [M, 3]."""
        means2d, conics, depths, opacities, radii = projection
        features = torch.cat([colors, depths[:, None]], dim=-1) if self.depth else colors
        probe = torch.zeros_like(means2d, requires_grad=torch.is_grad_enabled())
        if not self.absgrad:
            means2d = means2d + probe
        rows = {
            "means2d": means2d,
            "conics": conics,
            "opacities": opacities,
            "features": features,
            "depths": depths,
            "radii": radii,
        }
        return Splats(hits, rows, probe, probe_rendered=self.absgrad)

    def render(
        self, splats: Splats, patches: Sequence[Patch], views: Sequence[View], *, stops: bool = False,
        windows: Tensor | None = None,
    ) -> list[Pixels]:  # fmt: skip
        """See `Primitive.render`: alpha blending front to back, tile by tile."""
        rows, canvas = splats.rows, Canvas(patches, views)
        lists = cuda_ext.intersect(
            rows["means2d"].detach(),
            rows["conics"].detach(),
            rows["opacities"].detach(),
            rows["radii"],
            rows["depths"].detach(),
            splats.hits.view_ids,
            patches=canvas.flat,
            tile_size=TILE,
        )
        out, signed, _ = cuda_ext.rasterize(
            rows["means2d"],
            rows["conics"],
            rows["opacities"],
            rows["features"],
            *clip_lists(lists, rows["depths"], windows),
            patches=canvas.flat,
            tile_size=TILE,
            absgrad_probe=splats.probe if self.absgrad else None,
            mark_stops=stops,
        )
        images = canvas.cut(out)
        depths = [image[..., 3:4] for image in images] if self.depth else None
        return canvas.pixels([image[..., :3] for image in images], signed, depths, marked=stops, stops=stops)


@dataclass(frozen=True)
class Gaussians(GaussianPrimitive):
    """3D Gaussians.

    `Points.params` are what an optimizer sees: `means` [N, 3]; `quats` [N, 4] (w, x, y, z), of any length; `scales`
    [N, 3], natural logarithms; `opacities` [N, 1] or [N], logits; `features_dc` [N, 3] and `features_rest` [N, R, 3],
    spherical harmonics, or, with `sh_degree` None, `features_dc` alone: logits of the colour.
    """

    schema = SCHEMA

    def kernels(self, **options: Any) -> GaussianKernels:
        """See `Primitive.kernels`: options of `GaussianKernels` from `opacity_weight` on."""
        return GaussianKernels(
            self.sh_degree, self.antialiased, self.absgrad, self.eps2d, self.near, self.far, self.radius_clip, **options
        )

    def extents(self, points: Points) -> Tensor:
        """See `extents_of`."""
        return extents_of(points, lambda some: rotations(some["quats"]) * some["scales"].exp()[:, None, :])

    def cull(self, points: Points, views: Sequence[View], wanted: Sequence[int]) -> Hits:
        """See `Primitive.cull`: points whose bound overlaps the view's rectangle."""
        some = [views[v] for v in wanted]
        means = points.params["means"].detach()
        if not some:
            empty = torch.empty(0, dtype=torch.int32, device=means.device)
            return Hits(empty, empty)
        with torch.no_grad():
            view_ids, point_ids = cuda_ext.cull(
                means,
                self.activated(points, "scales"),
                self.activated(points, "opacities").reshape(-1),
                stack_viewmats(some).detach(),
                stack_intrinsics(some),
                sizes=sizes_of(some),
                rects=[n for view in some for n in (0, 0, view.width, view.height)],
                eps2d=self.eps2d,
                near=self.near,
                far=self.far,
            )
            if list(wanted) != list(range(len(wanted))):
                place = torch.tensor(list(wanted), dtype=torch.int32, device=view_ids.device)
                view_ids = place[view_ids.long()]
        return Hits(view_ids, point_ids)

    def splat(self, points: Points, hits: Hits, views: Sequence[View]) -> Splats:
        """See `Primitive.splat`.

        Rows: `means2d` [M, 2] pixels, `conics` [M, 3] inverse covariances (xx, xy, yy), `opacities` [M], `features`
        [M, 3] colours or [M, 4] with the depth, `depths` [M], `radii` [M, 2] half extents in pixels (0: not drawn).
        """
        params = points.params
        viewmats = stack_viewmats(views)
        projection = cuda_ext.project(
            params["means"],
            params["quats"],
            self.activated(points, "scales"),
            self.activated(points, "opacities").reshape(-1),
            viewmats,
            stack_intrinsics(views),
            sizes=sizes_of(views),
            view_ids=hits.view_ids,
            point_ids=hits.point_ids,
            eps2d=self.eps2d,
            near=self.near,
            far=self.far,
            antialiased=self.antialiased,
        )
        colors = row_colors(params, self.sh_degree, viewmats, hits.view_ids, hits.point_ids)
        return self.splats(hits, clip_rows(projection, self.radius_clip), colors)


def screen_radii(splats: Splats) -> Tensor:
    """Return the radius in pixels of each splat's 3-sigma circle, [M]; 0 if its bounding square is not in view.

    This is 3DGS's screen size for densification, as gsplat 1.4.0 computes it.
    """
    radii = splats.rows["radii"][:, 0]
    of_drawn = three_sigma_radii(splats.rows["conics"].detach())
    return torch.where(radii > 0, of_drawn, -radii.to(of_drawn.dtype))


def sizes_of(views: Sequence[View]) -> list[int]:
    """Return width and height of each view, flat."""
    return [n for view in views for n in (view.width, view.height)]
