"""Step kernels of primitives without fused operators, composed of differentiable ones: parameters to rows, and row
gradients to updated parameters.

Shapes follow from capacities alone, and nothing is read back, so that CUDA graphs can capture both.
"""

from abc import abstractmethod
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_layout import real_rows
from cuda_ext.ops.optim.adam import adam_step
from ns_multigpu.core.kernels import Cameras, Model, ReplicaRows, Rows
from ns_multigpu.core.schema import POSITION
from ns_multigpu.primitives.gather import spread
from ns_multigpu.primitives.row_kernels import RowKernels

MADE = {"opacities": "row_opacities", "features": "colors"}
"""Row columns with another name in projections."""


class RowLines(NamedTuple):
    """View and point of each line, sorted; padding has the last view and the point -1."""

    view_ids: Tensor
    point_ids: Tensor


class GatheredRows(NamedTuple):
    """Rows received from other ranks; all other columns follow from the points, which every rank has."""

    view_ids: Tensor
    point_ids: Tensor
    count: Tensor


@cache
def _made(columns: tuple[str, ...]) -> Any:
    """Return the class of projected lines: the projection's columns, and colours [M, 3]."""
    return namedtuple("Made", (*columns, "colors"))


def with_colors(projection: Any, colors: Tensor) -> Any:
    """Return a projection and its colours as one NamedTuple."""
    return _made(type(projection)._fields)(*projection, colors)


class ComposedKernels(RowKernels):
    """See `Kernels`. Adam is dense: points that are not drawn are updated with a gradient of zero in each step.

    Attributes:
        at_once: points tested at once for one view, which bounds temporary memory.
    """

    can_defer = False
    at_once: ClassVar[int] = 1 << 21

    @abstractmethod
    def made(self, params: Mapping[str, Tensor], cameras: Cameras, lines: RowLines) -> Any:
        """Project lines differentiably: return the rows' columns, named by `MADE`, and `radii` [M, 2] int32, as
        `Projection` has them (`with_colors`)."""

    @abstractmethod
    def shows(self, params: Mapping[str, Tensor], cameras: Cameras, lines: RowLines) -> Tensor:
        """Return a mask [M] of the lines that are drawn or count as seen. Only these become rows."""

    def rows(self, made: Any, lines: RowLines, count: Tensor) -> Rows:
        """Return the rows of projected lines."""
        columns = (getattr(made, MADE.get(name, name)) for name in self.layout.widths)
        return self.layout.rows(*lines, count, *columns, made.radii)

    def returned(self, made: Any, records: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of an output in `made` and its gradient, from gradient records [M, record_floats]."""
        gradients = self.layout.gradients_of(records)
        return [(getattr(made, MADE.get(name, name)), gradients[name]) for name in self.layout.widths]

    @abstractmethod
    def moved(self, made: Any, records: Tensor) -> tuple[Tensor, Tensor]:
        """Return densification statistics of each line: the gradient by screen position [M, 2] per pixel, and the
        screen radius [M] of drawn lines in pixels."""

    @torch.no_grad()
    def project(self, model: Model, cameras: Cameras, capacity: int) -> Rows:
        params = self._named(model.params)
        lines, count = self._seen(params, cameras, capacity)
        return self.rows(self.made(params, cameras, lines), lines, count)

    def replicas(self, ranks: int, capacity: int, device: torch.device) -> "PutReplicaRows":
        return PutReplicaRows(ranks * capacity, self.record_floats, device)

    @torch.no_grad()
    def update(
        self, model: Model, cameras: Cameras, scalars: Tensor, rows: Rows, records: Tensor, finite_flag: Tensor,
        finite_flag_views: range | None, v_viewmats: Tensor | None = None,
    ) -> None:  # fmt: skip
        if len(model.params[0]) == 0:
            finite_flag.zero_()
            if v_viewmats is not None:
                v_viewmats.zero_()
            return
        lines, real = RowLines(rows.view_ids, rows.point_ids), real_rows(rows.point_ids, rows.count)
        if rows.count.numel() > 1:  # operators expect padding at the end, not behind each segment
            order = real.logical_not().byte().sort(stable=True).indices
            real, records = real[order], records[order]
            last = len(cameras.viewmats) - 1
            ids = ((lines.view_ids, last), (lines.point_ids, -1))
            lines = RowLines(*(torch.where(real, column[order], padding) for column, padding in ids))
        with torch.enable_grad():
            leaves = [param.detach().requires_grad_() for param in model.params]
            poses = cameras.viewmats.detach().requires_grad_(v_viewmats is not None)
            made = self.made(self._named(leaves), replace(cameras, viewmats=poses), lines)
        drawn = real & (made.radii > 0).all(-1)
        records = torch.where(drawn[:, None], records, 0.0)
        pairs = self.returned(made, records)
        finite = torch.stack([given.reshape(len(drawn), -1).isfinite().all(-1) for _, given in pairs]).all(0)
        if finite_flag_views is not None:
            finite |= (lines.view_ids < finite_flag_views.start) | (lines.view_ids >= finite_flag_views.stop)
        outputs, given = ([pair[i] for pair in pairs] for i in (0, 1))
        wanted = leaves if v_viewmats is None else [*leaves, poses]
        found = torch.autograd.grad(outputs, wanted, given, allow_unused=True, materialize_grads=True)
        gradients = [gradient.contiguous() for gradient in found[: len(leaves)]]
        if v_viewmats is not None:
            v_viewmats.copy_(found[-1])
        if model.statistics:
            self._count(model.statistics, made, records, cameras.sizes, lines, real)
        finite_flag.copy_(torch.where(finite.all(), 0.0, torch.nan).view(1))
        adam_step(model.params, gradients, model.exp_avgs, model.exp_avg_sqs, scalars)

    def flush(self, model: Model) -> None:
        return  # no step is deferred

    def _named(self, params: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.parameters, params, strict=True))

    def _seen(self, params: Mapping[str, Tensor], cameras: Cameras, capacity: int) -> tuple[RowLines, Tensor]:
        """Return the first `capacity` lines that are drawn or count as seen, and their total number, [1] int64."""
        means = params[POSITION]
        device, points, views = means.device, len(means), len(cameras.viewmats)
        # One extra line receives the overflow.
        view_ids = torch.full((capacity + 1,), max(views - 1, 0), dtype=torch.int32, device=device)
        point_ids = torch.full((capacity + 1,), -1, dtype=torch.int32, device=device)
        count = torch.zeros(1, dtype=torch.int64, device=device)
        for v in range(views):
            one = cameras.of(v)
            for first in range(0, points, self.at_once):
                some = {name: value[first : first + self.at_once] for name, value in params.items()}
                ids = torch.arange(len(some[POSITION]), dtype=torch.int32, device=device)
                shows = self.shows(some, one, RowLines(torch.zeros_like(ids), ids))
                # Unused capacity for points is filled with non-finite positions.
                shows = shows & some[POSITION].isfinite().all(-1)
                place = shows.cumsum(0) - 1 + count
                count = count + shows.sum()
                place = torch.where(shows & (place < capacity), place, capacity)
                point_ids.scatter_(0, place, ids + first)
                view_ids.scatter_(0, place, torch.full_like(ids, v))
        return RowLines(view_ids[:capacity], point_ids[:capacity]), count

    def _count(
        self, statistics: Mapping[str, Tensor], made: Any, records: Tensor, sizes: Sequence[int], lines: RowLines,
        real: Tensor,
    ) -> None:  # fmt: skip
        """Add lines to the densification statistics; see `splat_update`."""
        by_place, radius = self.moved(made, records)
        seen = real & (made.radii[:, 0] != 0)
        drawn = real & (made.radii > 0).all(-1)
        views = len(sizes) // 2
        size = _of_views(sizes, lines.view_ids, by_place)
        lengths = torch.where(drawn, (by_place * (size / 2 * views)).norm(dim=-1), 0.0)
        radius = torch.where(drawn, radius, -made.radii[:, 0].to(radius.dtype)) / size.amax(-1)
        points = spread(lines.point_ids, len(next(iter(statistics.values()))))
        if "grad2d" in statistics:
            statistics["grad2d"].index_add_(0, points, lengths)
        if "count" in statistics:
            statistics["count"].index_add_(0, points, seen.to(statistics["count"].dtype))
        if "radii" in statistics:
            statistics["radii"].scatter_reduce_(0, points, torch.where(seen, radius, 0.0), "amax")


class PutReplicaRows(ReplicaRows):
    """View ids, point ids and gradient records, from which each rank computes the same update.

    Args:
        lines: of all ranks.
    """

    def __init__(self, lines: int, record_floats: int, device: torch.device) -> None:
        ids = [torch.full((lines,), value, dtype=torch.int32, device=device) for value in (0, -1)]
        self.everyone = [*ids, torch.zeros(lines, record_floats, device=device)]

    def mine(self, rows: Rows, records: Tensor, first_view: int) -> list[Tensor]:
        return [rows.view_ids + first_view, rows.point_ids, records]

    def rows(self, counts: Tensor) -> tuple[GatheredRows, Tensor]:
        view_ids, point_ids, records = self.everyone
        return GatheredRows(view_ids, point_ids, counts), records


def refuse_options(options: Mapping[str, Any], points: str) -> None:
    """Refuse update options that these kernels do not support.

    Args:
        options: of `Primitive.kernels`. points: name of the points in messages.

    Raises:
        ValueError: an unsupported option is set.
    """
    asked = [name for name, value in options.items() if value and name != "depth"]
    if asked:
        raise ValueError(f"The kernels of {points} have no option {asked[0]!r}: only those of 3D Gaussians have.")


def _of_views(sizes: Sequence[int], view_ids: Tensor, like: Tensor) -> Tensor:
    """Return the sizes [M, 2] of the lines' views, without host tensors: a graph cannot capture their upload."""
    columns = torch.zeros(len(view_ids), 2, dtype=like.dtype, device=like.device)
    if len(set(zip(sizes[::2], sizes[1::2], strict=True))) == 1:
        columns[:, 0], columns[:, 1] = sizes[0], sizes[1]
        return columns
    for v in range(len(sizes) // 2):
        for axis in (0, 1):
            columns[:, axis].masked_fill_(view_ids == v, sizes[2 * v + axis])
    return columns
