"""The 4D Gaussian as a primitive (Yang et al. 2024, "Real-time Photorealistic Dynamic Scene Representation and
Rendering with 4D Gaussian Splatting"): at a view's time it is a 3D Gaussian, and drawn as one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from cuda_ext.reference.projection import MIN_ALPHA
from ns_multigpu.core.types import Hits, Points, Splats, View, stack_intrinsics, stack_viewmats
from ns_multigpu.primitives.composed_kernels import refuse_options
from ns_multigpu.primitives.gather import spread, take
from ns_multigpu.primitives.gaussians.functions import GaussianPrimitive, extents_of, sizes_of
from ns_multigpu.primitives.moving.kernels import MovingKernels
from ns_multigpu.primitives.moving.schema import COSINES, SCHEMA
from ns_multigpu.primitives.moving.turning import turn
from ns_multigpu.primitives.radius_clip import clip_rows
from ns_multigpu.primitives.shading import camera_centers


@dataclass(frozen=True)
class MovingGaussians(GaussianPrimitive):
    """4D Gaussians.

    `Points.params`: `means` [N, 3], where a point is at its time; `times` [N, 1], that time, in the unit of
    `View.time`; `quats` and `motions` [N, 4] (w, x, y, z) of any length: the two rotors that turn the four axes are
    `quats` and `quats` times `motions` (see `cuda_ext.condition`), so that `quats` turns a point in space as that of a
    3D Gaussian does, and one whose `motions` is (1, 0, 0, 0) stands still; `scales` [N, 3], natural logarithms;
    `durations` [N, 1], the same for the axis of time, in the unit of `times`; `opacities` [N, 1] or [N], logits;
    `features_dc` [N, 3] and `features_rest` [N, R, 3], spherical harmonics, or with `sh_degree` None `features_dc`
    alone: logits of the colour; `cosines_dc` [N, C, 3] and `cosines_rest` [N, C, R, 3], harmonics that are multiplied
    by cos(2 pi n dt), n = 1 to C, where dt is the view's time less the point's (4D spherindrical harmonics with a
    period of 1; section 3.2 there). The cosines count from degree 1 on.

    A point is culled from views outside of which it is seen, and from those at whose time its opacity is below 1/255.
    """

    schema = SCHEMA

    def extents(self, points: Points) -> Tensor:
        """See `extents_of`: of ellipsoids in space and time, at all times."""
        return extents_of(points, lambda some: turn(some)[:, 1:])

    @torch.no_grad()
    def cull(self, points: Points, views: Sequence[View], wanted: Sequence[int]) -> Hits:
        """See `Primitive.cull`: points visible at the view's time whose bound overlaps its rectangle."""
        nothing = torch.empty(0, dtype=torch.int32, device=points.params["means"].device)
        found = [(nothing, nothing)]
        times, ids = (
            [views[v].time for v in wanted],
            torch.arange(len(points), dtype=torch.int32, device=nothing.device),
        )
        at_a_time: dict[float, tuple[Tensor, cuda_ext.Moment, Tensor]] = {}
        for position, time in zip(wanted, times, strict=True):
            if time not in at_a_time:
                at_a_time = {time: self._present(points, ids, time)}  # of one time: views of a video come in its order
            there, moment, bound = at_a_time[time]
            view = views[position]
            _, rows = cuda_ext.cull(
                moment.means, bound, moment.opacities, stack_viewmats([view]).detach(), stack_intrinsics([view]),
                sizes=sizes_of([view]), rects=[0, 0, view.width, view.height], eps2d=self.eps2d, near=self.near,
                far=self.far,
            )  # fmt: skip
            found.append((torch.full_like(rows, position), there[rows.long()]))
        view_ids, point_ids = (torch.cat(column) for column in zip(*found, strict=True))
        return Hits(view_ids, point_ids)

    def _present(self, points: Points, ids: Tensor, time: float) -> tuple[Tensor, cuda_ext.Moment, Tensor]:
        """Return the points [K] int32 that are visible at a time, their moments, and bounds [K, 3] on their scales."""
        view_times = points.params["means"].new_tensor([time])
        moment = self.moment(points, torch.zeros_like(ids), ids, view_times)
        there = (moment.opacities >= MIN_ALPHA).nonzero()[:, 0]
        moment = cuda_ext.Moment(*(part[there] for part in moment))
        # An eigenvalue is at most the largest sum of a row's magnitudes (Gershgorin).
        axes = moment.axes
        covariances = torch.stack([(axes * axes[:, i : i + 1]).sum(-1) for i in range(3)], dim=-1)
        largest = covariances.abs().sum(-1).amax(-1).sqrt()
        return ids[there], moment, largest[:, None].expand(-1, 3).contiguous()

    def splat(self, points: Points, hits: Hits, views: Sequence[View]) -> Splats:
        """See `Primitive.splat`; rows are those of `Gaussians.splat`."""
        viewmats = stack_viewmats(views)
        view_times = viewmats.new_tensor([view.time for view in views])
        moment = self.moment(points, hits.view_ids, hits.point_ids, view_times)
        projection = self.project(moment, hits.view_ids, viewmats, stack_intrinsics(views), sizes_of(views))
        colors = self.colors(points, hits.view_ids, hits.point_ids, viewmats, view_times, moment.means)
        return self.splats(hits, projection, colors)

    def kernels(self, **options: Any) -> MovingKernels:
        """See `Primitive.kernels`: `depth`.

        Raises:
            ValueError: an option is set that only 3D Gaussians' kernels support.
        """
        refuse_options(options, "4D Gaussians")
        return MovingKernels(self, self.absgrad, bool(options.get("depth")))

    def moment(self, points: Points, view_ids: Tensor, point_ids: Tensor, view_times: Tensor) -> cuda_ext.Moment:
        """Return rows' 3D Gaussians at their views' times; see `cuda_ext.condition`."""
        params = points.params
        return cuda_ext.condition(
            params["means"], params["times"].reshape(-1), params["quats"], params["motions"],
            torch.cat([params["durations"], params["scales"]], dim=-1).exp(),
            self.activated(points, "opacities").reshape(-1), view_times, view_ids, point_ids,
        )  # fmt: skip

    def project(
        self, moment: cuda_ext.Moment, view_ids: Tensor, viewmats: Tensor, Ks: Tensor, sizes: Sequence[int]
    ) -> cuda_ext.Projection:
        """Return the screen geometry of rows; see `cuda_ext.project_axes`."""
        rows = cuda_ext.project_axes(
            *moment, viewmats, Ks, sizes=sizes, view_ids=view_ids, eps2d=self.eps2d, near=self.near, far=self.far,
            antialiased=self.antialiased,
        )  # fmt: skip
        return clip_rows(rows, self.radius_clip)

    def colors(
        self, points: Points, view_ids: Tensor, point_ids: Tensor, viewmats: Tensor, view_times: Tensor, means: Tensor
    ) -> Tensor:
        """Return the colours [M, 3] of rows whose points are at `means` [M, 3] at their views' times."""
        params, place = points.params, spread(point_ids, len(points))
        if self.sh_degree is None:
            return take(params["features_dc"].sigmoid(), place)
        apart = view_times[view_ids.long()] - take(params["times"].reshape(-1), place)
        waves = [torch.cos(2 * math.pi * n * apart) * (self.sh_degree > 0) for n in range(1, COSINES + 1)]
        weights = torch.stack(waves, dim=-1)
        plain, rest = (
            cuda_ext.series(
                params[f"features_{part}"].flatten(1), params[f"cosines_{part}"].flatten(2), weights, view_ids,
                point_ids, len(viewmats),
            )
            for part in ("dc", "rest")
        )  # fmt: skip
        rest = rest.view(len(place), rest.shape[1] // 3, 3)
        rows = torch.arange(len(place), dtype=torch.int32, device=place.device)
        return cuda_ext.sh_colors(
            self.sh_degree, means, camera_centers(viewmats), plain, rest, view_ids=view_ids, point_ids=rows
        )
