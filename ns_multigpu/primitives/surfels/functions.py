"""The 2D Gaussian as a primitive (Huang et al. 2024, "2D Gaussian Splatting"), over the operators of `cuda_ext`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from cuda_ext.ops.raster.surfels import SurfelProjection, box_lists, project_surfels, rasterize_surfels
from cuda_ext.reference.surfels import surfel_radii
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.types import TILE, Hits, Patch, Pixels, Points, Splats, View, stack_intrinsics, stack_viewmats
from ns_multigpu.primitives.composed_kernels import refuse_options
from ns_multigpu.primitives.deterministic import rotations
from ns_multigpu.primitives.radius_clip import clip_rows
from ns_multigpu.primitives.shading import row_colors
from ns_multigpu.primitives.surfels.kernels import SurfelKernels
from ns_multigpu.primitives.surfels.schema import CHANNELS, SCHEMA

_CUTOFF = (2 * math.log(255)) ** 0.5
"""Standard deviations at which exp(-d^2 / 2) is 1/255."""
_DISC = _CUTOFF / 2**0.5
"""Pixels to which the low-pass filter on the screen widens a splat, at most."""
_AT_ONCE = 1 << 22
"""Points whose extents are computed at once."""


@dataclass(frozen=True)
class Surfels(Primitive):
    """2D Gaussians: flat, in the plane of their first two axes; the third is the normal.

    `Points.params` are those of `Gaussians`, with `scales` [N, 2].

    Attributes:
        sh_degree: harmonics in use now, 0 to 3; None for plain colours.
        depth: render expected depth as well: of the depths of centres, as gsplat 1.4.0's.
        channels: of `CHANNELS`, what else is rendered, into `Pixels.extra`.
        near, far: depths of centres beyond which nothing is drawn.
        radius_clip: half extents in pixels up to which a splat is not drawn; see `clip_rows`.

    Raises:
        ValueError: there is no channel of that name.
    """

    sh_degree: int | None = 3
    depth: bool = False
    channels: tuple[str, ...] = ()
    near: float = 0.01
    far: float = 1e10
    radius_clip: float = 0.0

    schema = SCHEMA
    shown = {"normals": 3}  # noqa: RUF012 - a class's, and never changed
    median = True

    def __post_init__(self) -> None:
        if unknown := [name for name in self.channels if name not in CHANNELS]:
            raise ValueError(f"2D Gaussians have no channel {unknown[0]!r}; they have {', '.join(CHANNELS)}.")

    def showing(self) -> "Surfels":
        """See `Primitive.showing`."""
        return replace(self, channels=tuple(self.shown))

    def with_median(self) -> "Surfels":
        """See `Primitive.with_median`."""
        return replace(self, channels=("median",))

    @torch.no_grad()
    def extents(self, points: Points) -> Tensor:
        """See `Primitive.extents`: of the disc beyond which an opaque point's alpha is below 1/255."""
        reached = [points.params["means"].new_zeros(0, 3)]
        quats, scales = points.params["quats"], points.params["scales"]
        for start in range(0, len(points), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            axes = rotations(quats[some])[:, :, :2] * scales[some].exp()[:, None, :]
            reached.append(_CUTOFF * axes.square().sum(-1).sqrt())
        return torch.cat(reached)

    @torch.no_grad()
    def cull(self, points: Points, views: Sequence[View], wanted: Sequence[int]) -> Hits:
        """See `Primitive.cull`: points that may be visible in their complete view, see `overlapping`."""
        means = points.params["means"]
        found = [torch.empty(0, dtype=torch.int64, device=means.device)]
        counts: list[int] = []
        for v in wanted:
            view = views[v]
            found.append(self.overlapping(points, view.viewmat, view.K, (view.width, view.height)).nonzero()[:, 0])
            counts.append(len(found[-1]))
        repeats = torch.tensor(counts, dtype=torch.int64, device=means.device)
        view_ids = torch.tensor(list(wanted), dtype=torch.int32, device=means.device).repeat_interleave(repeats)
        return Hits(view_ids, torch.cat(found).int())

    @torch.no_grad()
    def overlapping(self, points: Points, viewmat: Tensor, K: Tensor, size: Sequence[int]) -> Tensor:
        """Return a mask [N] of the points whose sphere, with the filter's disc, may overlap the frustum of a view.

        Points next to the camera or across its plane have no bounded box on the screen, and would be tested in every
        tile.

        Args:
            viewmat: [4, 4]. K: [3, 3]. size: width and height, pixels.
        """
        means = points.params["means"].detach()
        half_extents = self.activated(points, "scales").detach().amax(-1) * _CUTOFF
        seen = means @ viewmat[:3, :3].detach().T + viewmat[:3, 3].detach()
        shown = (seen[:, 2] >= self.near * (1 - 1e-5)) & (seen[:, 2] <= self.far * (1 + 1e-5))
        for axis, length in enumerate(size):
            focal, center = K[axis, axis], K[axis, 2]
            # Planes through the camera and the image's borders, moved outward; distances from them, inward.
            for sign, border in ((1, -_DISC - 1), (-1, length + _DISC + 1)):
                inward = sign * (focal * seen[:, axis] + (center - border) * seen[:, 2])
                away = torch.sqrt(focal * focal + (center - border) ** 2)
                shown &= inward + half_extents * away * (1 + 1e-4) >= 0
        return shown

    def splat(self, points: Points, hits: Hits, views: Sequence[View]) -> Splats:
        """See `Primitive.splat`.

        Rows: `means2d` [M, 2] pixels; `transforms` [M, 9], which takes a place in the splat's plane to homogeneous
        pixels; `normals` [M, 3] in camera space; `opacities` [M]; `features` [M, 3] colours; `depths` [M]; `radii`
        [M, 2]. See `SurfelProjection`.

        The probe's gradient is that of the centre on the screen, as the published code and gsplat count it: by the
        third column of the transform, times the depth (gsplat's `gradient_2dgs`).
        """
        viewmats = stack_viewmats(views)
        sizes = [n for view in views for n in (view.width, view.height)]
        rows = self.project(points, hits.view_ids, hits.point_ids, viewmats, stack_intrinsics(views), sizes)
        probe = torch.zeros_like(rows.means2d, requires_grad=torch.is_grad_enabled())
        moved = probe * rows.transforms[:, 8:].detach()
        still = torch.zeros_like(rows.transforms[:, :2])
        transforms = rows.transforms + torch.cat([still, moved[:, :1], still, moved[:, 1:], still, still[:, :1]], dim=1)
        columns = {
            "means2d": rows.means2d,
            "transforms": transforms,
            "normals": rows.normals,
            "opacities": rows.row_opacities,
            "features": self.colors(points, hits.view_ids, hits.point_ids, viewmats),
            "depths": rows.depths,
            "radii": rows.radii,
        }
        return Splats(hits, columns, probe)

    def render(
        self, splats: Splats, patches: Sequence[Patch], views: Sequence[View], *, stops: bool = False,
        windows: Tensor | None = None,
    ) -> list[Pixels]:  # fmt: skip
        """See `Primitive.render`.

        `Pixels.extra` has of `channels`: `normals` [h, w, 3], the sum of the splats' normals by their weights, in world
        space; `distortion` [h, w, 1], world units; `median` [h, w, 1], the depth at which alpha passes one half.
        """
        rows = splats.rows
        rectangles = [patch.rendered(views[patch.view]) for patch in patches]
        flat = [n for patch, rectangle in zip(patches, rectangles, strict=True) for n in (patch.view, *rectangle)]
        names = ("means2d", "transforms", "normals", "depths", "opacities", "radii")
        drawn = SurfelProjection(*(rows[name] for name in names))
        tile_offsets, row_ids = box_lists(drawn, splats.hits.view_ids, flat, TILE)
        if windows is not None:
            depths = rows["depths"].detach()
            tile_offsets, row_ids = cuda_ext.clip_lists(tile_offsets, row_ids, depths, windows.to(depths.dtype))
        pixels = rasterize_surfels(drawn, rows["features"], tile_offsets, row_ids, flat, TILE)
        stopped = pixels.alphas.detach() < 0
        alphas = torch.where(stopped, -pixels.alphas, pixels.alphas)
        result: list[Pixels] = []
        start = 0
        for patch, (x0, y0, x1, y1) in zip(patches, rectangles, strict=True):
            height, width = y1 - y0, x1 - x0
            piece = slice(start, start + height * width)
            start = piece.stop

            def image(values: Tensor, piece: slice = piece, height: int = height, width: int = width) -> Tensor:
                return values[piece].reshape(height, width, -1)

            alpha = image(alphas)
            depth = image(pixels.depths) / alpha.clamp(min=1e-10) if self.depth else None
            extra = dict[str, Tensor]()
            if "normals" in self.channels:
                extra["normals"] = image(pixels.normals) @ views[patch.view].viewmat[:3, :3]
            if "distortion" in self.channels:
                extra["distortion"] = image(pixels.distortion)
            if "median" in self.channels:
                extra["median"] = image(pixels.median)
            where = image(stopped) if stops else None
            result.append(Pixels(patch, image(pixels.colors), alpha, depth, where, extra))
        return result

    def kernels(self, **options: Any) -> SurfelKernels:
        """See `Primitive.kernels`: `depth`, and `losses`, see `SurfelKernels`.

        Raises:
            ValueError: an option is set that only 3D Gaussians' kernels support.
        """
        losses = options.pop("losses", {})
        refuse_options(options, SurfelKernels.title)
        return SurfelKernels(self, bool(options.get("depth")), losses)

    def project(
        self, points: Points, view_ids: Tensor, point_ids: Tensor, viewmats: Tensor, Ks: Tensor, sizes: Sequence[int]
    ) -> SurfelProjection:
        """Return the screen geometry of rows; see `cuda_ext.ops.raster.surfels.project_surfels`."""
        params = points.params
        rows = project_surfels(
            params["means"], params["quats"], self.activated(points, "scales"),
            self.activated(points, "opacities").reshape(-1), viewmats, Ks, sizes=sizes, view_ids=view_ids,
            point_ids=point_ids, near=self.near, far=self.far,
        )  # fmt: skip
        return clip_rows(rows, self.radius_clip)

    def colors(self, points: Points, view_ids: Tensor, point_ids: Tensor, viewmats: Tensor) -> Tensor:
        """The colours [M, 3] of rows."""
        return row_colors(points.params, self.sh_degree, viewmats, view_ids, point_ids)


def screen_radii(splats: Splats) -> Tensor:
    """Return the screen sizes [M] in pixels for densification: gsplat 1.4.0's radius; see `Gaussians`'."""
    radii = splats.rows["radii"][:, 0]
    of_drawn = surfel_radii(splats.rows["transforms"])
    return torch.where(radii > 0, of_drawn, -radii.to(of_drawn.dtype))
