"""Step operators of 3D Gaussians."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import GRADIENT_FLOATS, RECORD_FLOATS
from cuda_ext.ops.optim.fused import SplatRows, splat_forward, splat_update
from cuda_ext.ops.optim.lazy_adam import splat_flush
from cuda_ext.ops.project.boxes import new_boxes, splat_boxes
from ns_multigpu.core.kernels import Cameras, Model, PutRows, ReplicaRows
from ns_multigpu.primitives.gaussians.schema import ORDER
from ns_multigpu.primitives.radius_clip import clip_rows
from ns_multigpu.primitives.row_kernels import GaussianRowKernels

_MEANS, _LOG_SCALES = ORDER.index("means"), ORDER.index("scales")
_COLORS = slice(6, 9)
"""Slice of the colour gradients in a gradient record."""
_CONICS = 3
"""Index of the conics among the published arrays, from which densification computes radii."""


@dataclass(frozen=True)
class GaussianKernels(GaussianRowKernels):
    """See `Kernels`; rows and records as in `cuda_ext.ops.optim.fused` and `cuda_ext.ops.exchange.row_exchange`.

    Attributes:
        degree: harmonics in use, 0 to 3; None for plain colours.
        antialiased, absgrad, eps2d, near, far, radius_clip: see `Gaussians`.
        opacity_weight, scale_weight, needles, max_ratio, whole_step_scale: see `splat_update`.
        depth: `draw` blends depths too, as a fourth number of the colour.
        sized: see `Kernels`.
    """

    degree: int | None
    antialiased: bool = False
    absgrad: bool = False
    eps2d: float = 0.3
    near: float = 0.01
    far: float = 1e10
    radius_clip: float = 0.0
    opacity_weight: float = 0.0
    scale_weight: float = 0.0
    depth: bool = False
    sized: bool = True
    needles: Tensor | None = field(default=None, compare=False)
    max_ratio: float = 1.0
    whole_step_scale: float = 0.0

    parameters = ORDER

    def boxes(self, model: Model) -> Tensor:
        return new_boxes(model.params[_MEANS])

    def refresh(self, model: Model) -> None:
        if model.boxes is not None:
            splat_boxes(model.params[_MEANS], model.params[_LOG_SCALES], model.boxes)

    def project(self, model: Model, cameras: Cameras, capacity: int) -> SplatRows:
        rows = splat_forward(
            *model.params, viewmats=cameras.viewmats, Ks=cameras.Ks, sizes=cameras.sizes, degree=self.degree,
            capacity=capacity, eps2d=self.eps2d, near=self.near, far=self.far, antialiased=self.antialiased,
            exp_avgs=model.exp_avgs, exp_avg_sqs=model.exp_avg_sqs, lazy=model.lazy, boxes=model.boxes,
        )  # fmt: skip
        return clip_rows(rows, self.radius_clip)

    def replicas(self, ranks: int, capacity: int, device: torch.device) -> "GaussianReplicaRows":
        return GaussianReplicaRows(ranks * capacity, device)

    def update(
        self, model: Model, cameras: Cameras, scalars: Tensor, rows: SplatRows, records: Tensor, finite_flag: Tensor,
        finite_flag_views: range | None, v_viewmats: Tensor | None = None,
    ) -> None:  # fmt: skip
        statistics = model.statistics
        splat_update(
            model.params, model.exp_avgs, model.exp_avg_sqs, scalars=scalars, viewmats=cameras.viewmats, Ks=cameras.Ks,
            sizes=cameras.sizes, rows=rows, records=records, degree=self.degree, eps2d=self.eps2d, near=self.near,
            far=self.far, antialiased=self.antialiased, absgrad=self.absgrad, grad2d=statistics.get("grad2d"),
            seen=statistics.get("count"), radii_max=statistics.get("radii"), depth=self.depth,
            opacity_weight=self.opacity_weight, scale_weight=self.scale_weight, lazy=model.lazy,
            finite_flag=finite_flag, finite_flag_views=finite_flag_views, boxes=model.boxes,
            v_viewmats=v_viewmats, needles=self.needles, max_ratio=self.max_ratio,
            whole_step_scale=self.whole_step_scale,
        )  # fmt: skip

    def flush(self, model: Model) -> None:
        if model.lazy is not None:
            splat_flush(model.params, model.exp_avgs, model.exp_avg_sqs, model.lazy)


class GaussianReplicaRows(ReplicaRows):
    """View ids, point ids, radii, conics and gradient records: 92 bytes a row by collectives and 76 through memory,
    rather than a gradient of every parameter (236 bytes a point). Each rank takes the same step from the same rows in
    the same order, so that replicas stay the same to the last bit.

    Args:
        lines: of all ranks.
    """

    def __init__(self, lines: int, device: torch.device) -> None:
        ints = [torch.zeros(lines, *shape, dtype=torch.int32, device=device) for shape in ((), (), (2,))]
        self.everyone = [*ints, *(torch.zeros(lines, width, device=device) for width in (3, RECORD_FLOATS))]
        self._bright = torch.ones(lines, 3, device=device)

    def mine(self, rows: SplatRows, records: Tensor, first_view: int) -> list[Tensor]:
        # Apply the colour clamp's gradient here, so that colours need not be exchanged. This ReLU backward is one
        # in-place kernel, and yields no NaN as a product with zero would.
        by_color = records[:, _COLORS]
        torch.ops.aten.threshold_backward.grad_input(by_color, rows.features, 0, grad_input=by_color)
        # Records include 4 unused numbers of 16: faster than removing and restoring them.
        view_ids, *rest = self.to_put(rows, records, first_view).arrays
        return [view_ids + first_view, *rest]

    def to_put(self, rows: SplatRows, records: Tensor, first_view: int) -> PutRows:
        arrays = [rows.view_ids, rows.point_ids, rows.radii, rows.conics, records]
        return PutRows(arrays, [1, 1, 2, 3, GRADIENT_FLOATS], rows.features, _COLORS.start, first_view, (_CONICS,))

    def rows(self, counts: Tensor) -> tuple[SplatRows, Tensor]:
        view_ids, point_ids, radii, conics, records = self.everyone
        none = records.new_empty(0)
        return SplatRows(view_ids, point_ids, counts, none, conics, none, self._bright, none, radii), records
