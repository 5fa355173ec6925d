"""Operators of a primitive for fused steps, which read nothing back to the host."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.optim.lazy_adam import LazyAdam
from ns_multigpu.core.row_wire import RowFormat
from ns_multigpu.core.schema import flat
from ns_multigpu.core.types import Patch, View

Rows = Any
"""Rows of a rank's own points in a buffer of fixed length, padding included; returned by `Kernels.project`. A
NamedTuple with at least `view_ids` [M] int32, `point_ids` [M] int32, `count` (int64, per segment), `means2d` [M, 2]
and `radii` [M, 2] int32. Rows are routed by the last two."""
Received = Any
"""Rows of a rank's patches, local or received. At least `means2d`, `radii` and `view_ids` as above, and `owners` and
`slots` [M] int32: the owning rank of each row, and its line there."""
Lists = tuple[Tensor, Tensor, Tensor]
"""Rows of each tile, nearest first: tile_offsets, row_ids, and the capacity that the intersections need."""


@dataclass(frozen=True)
class Cameras:
    """Views as operators take them.

    Attributes:
        viewmats: [V, 4, 4]. Ks: [V, 3, 3], or [V, 7, 3] with lenses.
        sizes: (width, height) of each, 2 V ints.
        times: [V], of captures that move: see `View.time`.
    """

    viewmats: Tensor
    Ks: Tensor
    sizes: Sequence[int]
    times: Tensor

    def of(self, view: int) -> "Cameras":
        """Return one of the views."""
        one = slice(view, view + 1)
        return Cameras(self.viewmats[one], self.Ks[one], self.sizes[2 * view : 2 * view + 2], self.times[one])


@dataclass(frozen=True)
class Model:
    """Parameters, Adam moments and deferred steps that a training step updates, in the kernels' order.

    Attributes:
        params: as operators take them. exp_avgs, exp_avg_sqs: their moments.
        statistics: densification's `grad2d`, `count`, `radii`, [N] each, added to; empty to count nothing.
        lazy: deferred steps of points that are not drawn; None to defer none.
        boxes: bounding boxes of groups of points, for culling whole groups; None to test each point. See
            `Kernels.boxes`.
    """

    params: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    statistics: Mapping[str, Tensor]
    lazy: LazyAdam | None
    boxes: Tensor | None = None


@dataclass(frozen=True)
class Sinks:
    """Destinations of gradients: records at the addresses of several owners.

    Attributes:
        addresses: [S] int64. owners, slots: [rows] int32, the owner of each row, and the record there.
        system_scope: True if other GPUs add to the same records.
    """

    addresses: Tensor
    owners: Tensor
    slots: Tensor
    system_scope: bool


@dataclass(frozen=True)
class Drawn:
    """Blended patches as a flat list of pixels, and the state that backward needs.

    Attributes:
        color: [P, 3] without background, or [P, 4] with blended depth. alpha: [P].
        last: [P] int32, the last row of each pixel's list that counts; backward skips pixels with -1.
        rest: the kernels' own.
    """

    color: Tensor
    alpha: Tensor
    last: Tensor
    rest: Any


class PutRows(NamedTuple):
    """Row data that a rank writes into the other ranks' memory: see `cuda_ext.ops.exchange.put_rows`.

    Attributes:
        arrays: in the order of `ReplicaRows.everyone`, one line per row. taken: words of a line to write, per array.
        gate, gate_column: from this column on, the last array is written only where the gate is positive.
        offset: added to the first array's numbers.
        for_sizes: arrays that are needed only if sizes are counted.
    """

    arrays: Sequence[Tensor]
    taken: Sequence[int]
    gate: Tensor | None = None
    gate_column: int = 0
    offset: int = 0
    for_sizes: Collection[int] = ()

    def words(self, sized: bool) -> list[int]:
        """Return the number of words to write of each array's lines, with or without sizes."""
        return [words if sized or k not in self.for_sizes else 0 for k, words in enumerate(self.taken)]


class ReplicaRows(ABC):
    """Buffers in which ranks with the same points gather each other's rows.

    Attributes:
        everyone: tensors to fill with all ranks' `mine`, rank 0's first.
    """

    everyone: Sequence[Tensor]

    @abstractmethod
    def mine(self, rows: Rows, records: Tensor, first_view: int) -> list[Tensor]:
        """Return the data of this rank's rows and gradients that the other ranks need. Its view ids count in the batch.

        Args:
            first_view: the position in the batch of the first view of the rows.
        """

    def to_put(self, rows: Rows, records: Tensor, first_view: int) -> PutRows:
        """Return the same for ranks with access to each other's memory. Data written so need not be in `records`
        afterwards."""
        arrays = self.mine(rows, records, first_view)
        return PutRows(arrays, [array[:1].numel() for array in arrays])

    @abstractmethod
    def rows(self, counts: Tensor) -> tuple[Rows, Tensor]:
        """Return all ranks' rows, one segment per rank, and their gradient records, once `everyone` is filled.

        Args:
            counts: [ranks] int64, the rows of each.
        """


class Kernels(RowFormat):
    """Operators of a primitive: parameters to rows, rows to pixels, and gradients to an Adam step.

    No operator reads anything back to the host, so that CUDA graphs can capture them.

    Attributes:
        parameters: the names of the parameters in the order that operators take them.
        gradient_floats: numbers of a gradient record that are gradients: its first. Others may hold anything.
        sized: True if `update` counts the points' sizes on the screen on any rank.
        can_defer: True if steps of points that are not drawn can be deferred: `model` takes `lazy`.
        supports_half: True if `wire` takes `half`.
    """

    parameters: tuple[str, ...]
    gradient_floats: int
    sized: bool = True
    can_defer: bool = True
    supports_half: bool = True

    def model(
        self,
        params: Mapping[str, Tensor],
        moments: Mapping[str, tuple[Tensor, Tensor]],
        statistics: Mapping[str, Tensor],
        lazy: LazyAdam | None,
    ) -> Model:
        """Return the operators' inputs from an optimizer's parameters, moments and statistics.

        Raises:
            ValueError: these kernels do not allow `lazy`.
        """
        if lazy is not None and not self.can_defer:
            raise ValueError("These points take each step when it comes: leave lazy out.")
        of_params = [flat(name, params[name].detach()) for name in self.parameters]
        first, second = ([flat(name, moments[name][i]) for name in self.parameters] for i in (0, 1))
        return Model(of_params, first, second, dict(statistics), lazy)

    def boxes(self, model: Model) -> Tensor | None:
        """Return an unfilled buffer for bounding boxes of groups of points; None if the kernels have no groups.

        `refresh` fills the boxes; `update` extends them to contain what it writes.
        """
        return None

    def refresh(self, model: Model) -> None:
        """Compute the model's boxes, if it has any, from the current points."""
        assert model.boxes is None, "kernels that make boxes know how to fill them"

    @abstractmethod
    def project(self, model: Model, cameras: Cameras, capacity: int) -> Rows:
        """Return the rows of the points for whole views, in (view, point) order, padded to `capacity` lines."""

    @abstractmethod
    def receive_local(self, rows: Rows, owners: Tensor, slots: Tensor) -> Received:
        """Return the input of drawing for local rows."""

    @abstractmethod
    def pack(self, rows: Rows, place: Tensor, segments: Tensor, capacity: int) -> None:
        """Write the rows' records to lines `place` [ranks, M] of the segments."""

    @abstractmethod
    def unpack(self, records: Tensor, counts: Tensor, views: int) -> Received:
        """Return the rows of records [ranks, capacity, record_floats], of which `counts` [ranks] are valid."""

    @abstractmethod
    def replicas(self, ranks: int, capacity: int, device: torch.device) -> "ReplicaRows":
        """Return buffers for the rows of ranks with the same points, each of `capacity` lines."""

    @abstractmethod
    def intersect(self, received: Received, patches: Sequence[int], capacity: int) -> Lists:
        """Return the lists of the patches' tiles: 5 ints per patch (view, x0, y0, x1, y1)."""

    @abstractmethod
    def draw(self, received: Received, lists: Lists, patches: Sequence[int], mark_stops: bool = False) -> Drawn:
        """Draw the patches. With `mark_stops`, alpha is negative where drawing stopped before a row."""

    def shown(self, drawn: Drawn, view: View) -> Mapping[str, Tensor]:
        """Return the extra images of patches of a view, by the names of `Primitive.shown`: [P, numbers] each."""
        return {}

    def more_losses(self, drawn: Drawn, patches: Sequence[Patch], views: Sequence[View], report: Tensor) -> Drawn:
        """Compute the losses on images other than the colour, if the kernels have any.

        Args:
            drawn: the patches, as their owners drew them.
            report: [views] losses are added to it; they are divided by the batch's number of views.

        Returns:
            the input of `draw_back`.
        """
        return drawn

    @abstractmethod
    def draw_back(self, drawn: Drawn, v_color: Tensor, v_alpha: Tensor, sinks: Sinks) -> None:
        """Add the gradients of rows, as records, to the sinks; v_alpha is by the absolute value of alpha."""

    @abstractmethod
    def update(
        self, model: Model, cameras: Cameras, scalars: Tensor, rows: Rows, records: Tensor, finite_flag: Tensor,
        finite_flag_views: range | None, v_viewmats: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Propagate the rows' gradients to the parameters, take Adam's step and update the statistics.

        Args:
            scalars: [parameters, 8] Adam's, see `cuda_ext.ops.optim.adam.adam_scalars`.
            finite_flag: [1] written: finite if all gradients of the rows of `finite_flag_views` are (None: of all
                rows).
            v_viewmats: [V, 4, 4] written: the gradient by the cameras' matrices, the same bits from the same rows.
        """

    @abstractmethod
    def flush(self, model: Model) -> None:
        """Apply the deferred steps. Boxes must be refreshed afterwards."""
