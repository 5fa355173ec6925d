"""Step operators of 4D Gaussians. Rows are exchanged and drawn as 3D Gaussians; projection and its backward differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cuda_ext.ops.project.projection import three_sigma_radii
from cuda_ext.reference.projection import MIN_ALPHA
from ns_multigpu.core.kernels import Cameras
from ns_multigpu.core.schema import names
from ns_multigpu.core.types import Points
from ns_multigpu.primitives.composed_kernels import ComposedKernels, RowLines, with_colors
from ns_multigpu.primitives.moving.schema import SCHEMA
from ns_multigpu.primitives.row_kernels import GaussianRowKernels

if TYPE_CHECKING:
    from ns_multigpu.primitives.moving.functions import MovingGaussians


@dataclass(frozen=True)
class MovingKernels(ComposedKernels, GaussianRowKernels):
    """See `Kernels`.

    Attributes:
        kind: what its functions say of points. absgrad, depth: see `GaussianRowKernels`.
    """

    kind: "MovingGaussians"
    absgrad: bool
    depth: bool = False

    parameters = names(SCHEMA)

    def made(self, params: Mapping[str, Tensor], cameras: Cameras, lines: RowLines) -> Any:
        points = Points(dict(params))
        moment = self.kind.moment(points, *lines, cameras.times)
        projection = self.kind.project(moment, lines.view_ids, cameras.viewmats, cameras.Ks, cameras.sizes)
        colors = self.kind.colors(points, *lines, cameras.viewmats, cameras.times, moment.means)
        real = (lines.point_ids >= 0)[:, None]
        radii = torch.where(real, projection.radii, 0)
        colors = torch.where((radii > 0).all(-1, keepdim=True), colors, 0.0)
        return with_colors(projection._replace(radii=radii), colors)

    def shows(self, params: Mapping[str, Tensor], cameras: Cameras, lines: RowLines) -> Tensor:
        moment = self.kind.moment(Points(dict(params)), *lines, cameras.times)
        splats = self.kind.project(moment, lines.view_ids, cameras.viewmats, cameras.Ks, cameras.sizes)
        return (splats.radii != 0).any(-1) & (moment.opacities >= MIN_ALPHA)

    def moved(self, made: Any, records: Tensor) -> tuple[Tensor, Tensor]:
        return records[:, 10:12] if self.absgrad else records[:, 0:2], three_sigma_radii(made.conics.detach())
