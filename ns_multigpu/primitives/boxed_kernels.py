"""Kernels of primitives whose rows only a box bounds on the screen, and which have their own raster operators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import add_records
from ns_multigpu.core.kernels import Cameras, Drawn, Lists, Received, Sinks
from ns_multigpu.core.types import TILE, Points
from ns_multigpu.primitives.composed_kernels import ComposedKernels, RowLines, with_colors
from ns_multigpu.primitives.row_wire import LayoutWire


class Composited(NamedTuple):
    """Inputs and outputs of `rasterize_<name>`, which the way back needs.

    Attributes:
        extra: [P] or [P, n] further numbers of pixels; the first is the depth.
        v_extra, v_covered: gradients of further losses by `extra` and by what is covered, or None.
    """

    inputs: tuple[Tensor, ...]
    lists: tuple[Tensor, Tensor]
    patches: list[int]
    color: Tensor
    extra: Tensor
    alpha: Tensor
    last: Tensor
    state: Tensor
    v_extra: Tensor | None = None
    v_covered: Tensor | None = None


@dataclass(frozen=True)
class BoxedKernels(ComposedKernels):
    """Kernels of such a primitive; see `Kernels`. A subclass defines how points become rows.

    Attributes:
        kind: the primitive.
        depth: whether `draw` blends depths too, as a fourth number of the colour.
        title: name of the points in messages.
        layout: of the rows; its columns are the operators' inputs, in their order.
        keeps_last: whether `last` is needed whole after the image's loss, which wipes out what it does not need.
    """

    kind: Any
    depth: bool = False

    supports_half = False
    title: ClassVar[str]

    @property
    def keeps_last(self) -> bool:
        return False

    def projected(self, params: Mapping[str, Tensor], cameras: Cameras, lines: RowLines) -> tuple[Points, Any]:
        """Return the points, and the primitive's projection of lines."""
        points = Points(dict(params))
        return points, self.kind.project(points, *lines, cameras.viewmats, cameras.Ks, cameras.sizes)

    def made(self, params: Mapping[str, Tensor], cameras: Cameras, lines: RowLines) -> Any:
        points, found = self.projected(params, cameras, lines)
        return with_colors(found, self.kind.colors(points, *lines, cameras.viewmats))

    def draw(self, received: Received, lists: Lists, patches: Sequence[int], mark_stops: bool = False) -> Drawn:
        inputs = tuple(self.layout.columns_of(received))
        flat = list(patches)
        rasterize = getattr(torch.ops.ns_multigpu, f"rasterize_{self.kind.operators.name}")
        color, extra, alpha, last, state = rasterize(*inputs, *lists[:2], flat, TILE)
        kept = last.clone() if self.keeps_last else last
        rest = Composited(inputs, lists[:2], flat, color, extra, alpha, kept, state)
        if self.depth:
            depth = extra if extra.dim() == 1 else extra[:, 0]
            color = torch.cat([color, depth[:, None]], dim=-1)
        return Drawn(color, alpha if mark_stops else alpha.abs(), last, rest)

    def draw_back(self, drawn: Drawn, v_color: Tensor, v_alpha: Tensor, sinks: Sinks) -> None:
        rest: Composited = drawn.rest
        v_extra = torch.zeros_like(rest.extra) if rest.v_extra is None else rest.v_extra
        if self.depth:
            v_color, v_depth = v_color[:, :3].contiguous(), v_color[:, 3]
            v_extra = v_extra.clone()
            (v_extra if v_extra.dim() == 1 else v_extra[:, 0]).add_(v_depth)
        v_covered = v_alpha if rest.v_covered is None else v_alpha + rest.v_covered
        backward = getattr(torch.ops.ns_multigpu, f"rasterize_{self.kind.operators.name}_backward")
        found = backward(
            *rest.inputs, *rest.lists, rest.patches, TILE, rest.color, rest.extra, rest.alpha, rest.last, rest.state,
            v_color, v_extra, v_covered,
        )  # fmt: skip
        records = self.layout.records_of(found)
        add_records(records, sinks.addresses, sinks.owners, sinks.slots, sinks.system_scope)

    def wire(self, *, half: bool, slots: bool) -> LayoutWire:
        if half:
            raise ValueError(f"Rows of {self.title} cross the wire whole: leave half out.")
        return super().wire(half=half, slots=slots)
