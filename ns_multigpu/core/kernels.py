"""The second face of a primitive: its operators, as a step calls them that reads nothing back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.optim.lazy_adam import LazyAdam
from ns_multigpu.core.row_wire import RowWire
from ns_multigpu.core.types import Patch, View

Rows = Any
"""The rows of a rank's own points, in lines of a fixed number, padding included: what `Kernels.project` returns. A
NamedTuple with at least `view_ids` [M] int32, `point_ids` [M] int32, `count` (int64, of each segment of lines),
`means2d` [M, 2] and `radii` [M, 2] int32, by which rows are routed."""
Arrived = Any
"""Rows of a rank's patches, wherever they came from. At least `means2d`, `radii`, `view_ids` as above, and `owners` and
`slots` [M] int32: which rank owns the row, and its line there."""
Lists = tuple[Tensor, Tensor, Tensor]
"""Which rows each tile has, nearest first: tile_offsets, row_ids, and how many intersections need room."""


@dataclass(frozen=True)
class Cameras:
    """Views as operators take them.

    Attributes:
        viewmats: [V, 4, 4]. Ks: [V, 3, 3].
        sizes: (width, height) of each, 2 V ints.
        times: [V], of captures that move: see `View.time`.
    """

    viewmats: Tensor
    Ks: Tensor
    sizes: Sequence[int]
    times: Tensor

    def of(self, view: int) -> "Cameras":
        """One of the views."""
        one = slice(view, view + 1)
        return Cameras(self.viewmats[one], self.Ks[one], self.sizes[2 * view : 2 * view + 2], self.times[one])


@dataclass(frozen=True)
class Model:
    """What a step changes: parameters and moments in the kernels' order, and what is put off.

    Attributes:
        params: as operators take them. exp_avgs, exp_avg_sqs: their moments.
        statistics: densification's `grad2d`, `count`, `radii`, [N] each, added to; empty to count nothing.
        lazy: put off the steps of points that are not drawn, and keep them there; None not to.
        boxes: of groups of points, by which whole groups are culled; None to look at each point. See `Kernels.boxes`.
    """

    params: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    statistics: Mapping[str, Tensor]
    lazy: LazyAdam | None
    boxes: Tensor | None = None


@dataclass(frozen=True)
class Sinks:
    """Where gradients are added up: records at the addresses of several owners.

    Attributes:
        addresses: [S] int64. owners, slots: [rows] int32, which of them, and the record there.
        system_scope: whether other GPUs add to the same records.
    """

    addresses: Tensor
    owners: Tensor
    slots: Tensor
    system_scope: bool


@dataclass(frozen=True)
class Drawn:
    """Blended patches, a pixel after the other, and what the way back needs.

    Attributes:
        color: [P, 3] without background. alpha: [P].
        last: [P] int32, the last row of each pixel's list that counts; where -1 the way back looks at nothing.
        rest: the kernels' own.
    """

    color: Tensor
    alpha: Tensor
    last: Tensor
    rest: Any


class PutRows(NamedTuple):
    """What a rank writes into the others' memory of its rows: see `cuda_ext.ops.exchange.put_rows`.

    Attributes:
        arrays: in the order of `ReplicaRows.everyone`, a line a row. taken: of each, the words of a line that matter.
        gate, gate_column: of which of the last array's columns nothing is told where the gate is not above zero.
        offset: what is added to the first array's numbers.
        for_sizes: which arrays nobody needs where no sizes are counted.
    """

    arrays: Sequence[Tensor]
    taken: Sequence[int]
    gate: Tensor | None = None
    gate_column: int = 0
    offset: int = 0
    for_sizes: Collection[int] = ()

    def words(self, sized: bool) -> list[int]:
        """How many words of each array's lines are told, where sizes are counted or not."""
        return [words if sized or k not in self.for_sizes else 0 for k, words in enumerate(self.taken)]


class ReplicaRows(ABC):
    """What ranks that hold the same points tell each other of the rows that they drew.

    Attributes:
        everyone: tensors that are to be filled with all ranks' `mine`, rank 0's first.
    """

    everyone: Sequence[Tensor]

    @abstractmethod
    def mine(self, rows: Rows, records: Tensor, first_view: int) -> list[Tensor]:
        """What the others need of this rank's rows and their gradients. View ids are of the batch from here on.

        Args:
            first_view: the position in the batch of the first view of the rows.
        """

    def told(self, rows: Rows, records: Tensor, first_view: int) -> PutRows:
        """The same for ranks that reach each other's memory. What is told so need not be in `records` afterwards."""
        arrays = self.mine(rows, records, first_view)
        return PutRows(arrays, [array[:1].numel() for array in arrays])

    @abstractmethod
    def rows(self, counts: Tensor) -> tuple[Rows, Tensor]:
        """All ranks' rows, a segment each, and their gradient records, once `everyone` is filled.

        Args:
            counts: [ranks] int64, the rows of each.
        """


class Kernels(ABC):
    """A primitive's operators: from parameters to rows to pixels, and back to parameters that have taken a step.

    None of them reads anything back to the host, so that CUDA graphs can hold them.

    Attributes:
        parameters: the names of the parameters in the order that operators take them.
        record_floats: numbers of a row's record: as it travels, and of its gradients.
        sized: whether `update` counts on any rank how large points are on the screen.
        puts_off: whether `model` takes `lazy`. halves: whether `wire` takes `half`.
        terms: the losses that `more_losses` can take, by what they are of.
    """

    parameters: tuple[str, ...]
    record_floats: int
    sized: bool = True
    puts_off: bool = True
    halves: bool = True
    terms: tuple[str, ...] = ()

    @abstractmethod
    def model(
        self,
        params: Mapping[str, Tensor],
        moments: Mapping[str, tuple[Tensor, Tensor]],
        statistics: Mapping[str, Tensor],
        lazy: LazyAdam | None,
    ) -> Model:
        """What the operators take, of what an optimizer sees.

        Raises:
            ValueError: `lazy` cannot be had with these kernels' options.
        """

    def boxes(self, model: Model) -> Tensor | None:
        """Room for boxes around groups of the model's points, not yet filled; None of kernels that know no groups.

        `refresh` fills them; `update` keeps them such that they hold what it writes.
        """
        return None

    def refresh(self, model: Model) -> None:
        """Makes the model's boxes, if it has any, those of the points as they are."""
        assert model.boxes is None, "kernels that make boxes know how to fill them"

    @abstractmethod
    def project(
        self, model: Model, cameras: Cameras, capacity: int, stops: Sequence[int],
        reached: Callable[[Rows, int, int], None] | None,
    ) -> Rows:  # fmt: skip
        """Rows of the points for whole views, in (view, point) order.

        Args:
            capacity: lines of the result.
            stops, reached: lines at which `reached` is called with the rows, the stop before and this one.
        """

    @abstractmethod
    def stay(self, rows: Rows, owners: Tensor, slots: Tensor) -> Arrived:
        """Rows that are drawn where they are."""

    @abstractmethod
    def pack(self, rows: Rows, place: Tensor, segments: Tensor, capacity: int, first: int, end: int) -> None:
        """Writes records of lines first to end to where `place` [ranks, M] says in the segments at these addresses."""

    @abstractmethod
    def unpack(self, records: Tensor, counts: Tensor, views: int) -> Arrived:
        """The rows of records [ranks, capacity, record_floats], of which `counts` [ranks] are there."""

    @abstractmethod
    def collect(self, place: Tensor, count: Tensor, sources: Tensor, capacity: int) -> Tensor:
        """Sums of gradient records [M, record_floats] over the ranks that drew the rows, at these addresses."""

    @abstractmethod
    def wire(self, *, half: bool, slots: bool) -> RowWire:
        """How rows and gradients cross the wire by collectives.

        Args:
            half: what can be is float16. slots: rows bring their line at their owner.
        """

    @abstractmethod
    def replicas(self, ranks: int, capacity: int, device: torch.device) -> "ReplicaRows":
        """Room for what ranks that hold the same points tell each other, each of so many lines."""

    @abstractmethod
    def intersect(self, arrived: Arrived, patches: Sequence[int], capacity: int) -> Lists:
        """The lists of the patches' tiles: 5 ints a patch (view, x0, y0, x1, y1)."""

    @abstractmethod
    def draw(self, arrived: Arrived, lists: Lists, patches: Sequence[int], mark_stops: bool = False) -> Drawn:
        """The patches. With `mark_stops` alpha is negative where drawing stopped before a row."""

    def shown(self, drawn: Drawn, view: View) -> Mapping[str, Tensor]:
        """What pictures show of patches of a view, by the names of `Primitive.shown`: [P, numbers] each."""
        return {}

    def more_losses(self, drawn: Drawn, patches: Sequence[Patch], views: Sequence[View], report: Tensor) -> Drawn:
        """Takes the losses of what patches show beside their image, where the kernels were made with any.

        Args:
            drawn: the patches, as they were drawn by whom they belong to.
            report: the views' losses are added to it, by view; they are a batch's divided by its views.

        Returns:
            what `draw_back` is to be given.
        """
        return drawn

    @abstractmethod
    def draw_back(self, drawn: Drawn, v_color: Tensor, v_alpha: Tensor, sinks: Sinks) -> None:
        """Adds the gradients of rows, as records, to the sinks; v_alpha is by the absolute value of alpha."""

    @abstractmethod
    def update(
        self, model: Model, cameras: Cameras, scalars: Tensor, rows: Rows, records: Tensor, finite_flag: Tensor,
        finite_flag_views: range | None,
    ) -> None:  # fmt: skip
        """Brings the gradients of rows to the parameters, takes Adam's step there and adds to the statistics.

        Args:
            scalars: [parameters, 8] Adam's, see `cuda_ext.ops.optim.adam.AdamStep`.
            finite_flag: [1] written: a number that is finite where all gradients of the rows of `finite_flag_views`
            (None: of
                all) are.
        """

    @abstractmethod
    def flush(self, model: Model) -> None:
        """Takes the steps that were put off. Boxes are to be made anew then."""
