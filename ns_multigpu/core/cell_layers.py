# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Layers of a batch, a view and a cell each, where splats of a cell may be drawn by ranks that do not own it.

A layer's number here is view * cells + cell, on every rank. On the wire a row has view * most + k, of its owner's k-th
cell, where no rank has more cells than `most`: that is the view's number where each has one, and a row's label has
eight bits. Whose segment a row came in says the rest.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.row_spans import row_spans
from ns_multigpu.core.composite import LocalCells
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.row_spans import spans_length
from ns_multigpu.core.types import Patch, View


class CellLayers(LocalCells):
    """The cells of all ranks.

    Args:
        local: those of this rank.
        bounds: [ranks + 1] each rank's first cell, and how many there are.
    """

    def __init__(self, local: LocalCells, bounds: Sequence[int]) -> None:
        super().__init__(0, bounds[-1])
        self._local, self._bounds = local, tuple(bounds)
        self.most = max((b - a for a, b in pairwise(bounds)), default=1)
        self._firsts: Tensor | None = None

    def layer(self, patch: Patch) -> int:
        return patch.view * self.count + patch.cell

    def layers(self, view_ids: Tensor, point_ids: Tensor) -> Tensor:
        """Rows of other ranks bring their layers."""
        return view_ids

    def global_layers(self, view_ids: Tensor, point_ids: Tensor) -> Tensor:
        """[M] int32, the layers of rows of this rank's points."""
        local = self._local
        own = view_ids * local.count if local.count > 1 else view_ids
        return view_ids * self.count + local.first + local.layers(view_ids, point_ids) - own

    def label(self, rows: Any) -> Any:
        if self.most == 1:
            return rows
        layers = self.global_layers(rows.view_ids, rows.point_ids)
        return rows._replace(view_ids=self._labels_of(layers))

    def labels(self, views: int) -> int:
        return views * self.most

    def unlabel(self, arrived: Any, point_ids: Tensor) -> Any:
        labels, owners = arrived.view_ids, arrived.owners
        if self._firsts is None or self._firsts.device != labels.device:
            self._firsts = torch.tensor(self._bounds[:-1], dtype=torch.int32, device=labels.device)
        last = self.count - 1  # of padding, which may be labelled as a cell that its rank lacks
        cells = (self._firsts[owners.long()] + labels % self.most).clamp(max=last)
        return arrived._replace(view_ids=labels // self.most * self.count + cells)

    def rectangles(self, plan: Plan, views: Sequence[View], ways: Sequence[int], first_view: int) -> list[int]:
        local = range(self._local.first, self._local.first + self._local.count)
        return [
            n
            for rank, patches in enumerate(plan.drawn)
            for p in patches
            if p.cell in local
            for n in (ways[rank], p.view * self.most + p.cell - local.start, *p.rendered(views[p.view]))
        ]

    def spans(self, layers: Tensor, means2d: Tensor, radii: Tensor, views: Sequence[View], count: Tensor | None = None
              ) -> Tensor:  # fmt: skip
        """What this rank tells of `Learns.SPANS`: see `row_spans`. `layers` are `global_layers`, of its own rows."""
        sizes = [(view.width, view.height) for view in views for _ in range(self.most)]
        return row_spans(self._labels_of(layers).int(), means2d, radii, sizes, count)

    def spans_of(self, rows: Any, views: Sequence[View]) -> Tensor:
        """The same of a fused step's rows."""
        layers = self.global_layers(rows.view_ids, rows.point_ids)
        return self.spans(layers, rows.means2d, rows.radii, views, rows.count)

    def spans_length(self, views: Sequence[tuple[int, int]]) -> int:
        """How many numbers these are, of views of these sizes."""
        return self.most * spans_length(views)

    def _labels_of(self, layers: Tensor) -> Tensor:
        return layers // self.count * self.most + layers % self.count - self._local.first
