"""The operators of 3D convexes, as a step calls them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.row_exchange import add_records
from ns_multigpu.core.kernels import Cameras, Drawn, Lists, Sinks
from ns_multigpu.core.schema import names
from ns_multigpu.core.types import TILE, Points
from ns_multigpu.primitives.composed_kernels import Lines
from ns_multigpu.primitives.convexes.rows import CONVEX_PARTS, ArrivedConvexes, ConvexGradients, ConvexRows
from ns_multigpu.primitives.convexes.schema import SCHEMA
from ns_multigpu.primitives.part_kernels import PartKernels

if TYPE_CHECKING:
    from ns_multigpu.primitives.convexes.functions import Convexes


class MadeConvexes(NamedTuple):
    """What lines become: `ConvexProjection`, and colours [M, 3]."""

    means2d: Tensor
    lines: Tensor
    sharpness: Tensor
    depths: Tensor
    row_opacities: Tensor
    radii: Tensor
    colors: Tensor


class _Rest(NamedTuple):
    """What the way back needs: the operator's inputs and outputs."""

    inputs: tuple[Tensor, ...]
    lists: tuple[Tensor, Tensor]
    patches: list[int]
    color: Tensor
    depth: Tensor
    alpha: Tensor
    last: Tensor


@dataclass(frozen=True)
class ConvexKernels(PartKernels):
    """See `Kernels`.

    Attributes:
        kind: what its functions say of points.
        depth: `draw` blends depths too, as a fourth number of the colour; then there is no way back.
    """

    kind: "Convexes"
    depth: bool = False

    parameters = names(SCHEMA)
    title = "3D convexes"
    layout = CONVEX_PARTS
    record_floats = CONVEX_PARTS.record_floats
    at_once = 1 << 19
    """See `ComposedKernels`: some 300 bytes each."""

    def made(self, params: Mapping[str, Tensor], cameras: Cameras, lines: Lines) -> MadeConvexes:
        points = Points(dict(params))
        found = self.kind.project(points, *lines, cameras.viewmats, cameras.Ks, cameras.sizes)
        return MadeConvexes(*found, self.kind.colors(points, *lines, cameras.viewmats))

    def shows(self, params: Mapping[str, Tensor], cameras: Cameras, lines: Lines) -> Tensor:
        found = self.kind.project(Points(dict(params)), *lines, cameras.viewmats, cameras.Ks, cameras.sizes)
        return (found.radii > 0).all(-1)

    def rows(self, made: MadeConvexes, lines: Lines, count: Tensor) -> ConvexRows:
        shape = (made.means2d, made.lines, made.sharpness)
        return ConvexRows(*lines, count, *shape, made.row_opacities, made.colors, made.depths, made.radii)

    def returned(self, made: MadeConvexes, records: Tensor) -> list[tuple[Tensor, Tensor]]:
        g: ConvexGradients = self.layout.gradients_of(records)
        return [
            (made.means2d, g.means2d), (made.lines, g.lines), (made.sharpness, g.sharpness),
            (made.row_opacities, g.opacities), (made.colors, g.features),
        ]  # fmt: skip

    def moved(self, made: MadeConvexes, records: Tensor) -> tuple[Tensor, Tensor]:
        """The whole hull's; no rule is about sizes on the screen: see `convexes.functions.screen_radii`."""
        return self.layout.gradients_of(records).means2d, torch.zeros_like(made.depths).detach()

    def draw(self, arrived: ArrivedConvexes, lists: Lists, patches: Sequence[int], mark_stops: bool = False) -> Drawn:
        a = arrived
        inputs = (a.means2d, a.lines, a.sharpness, a.opacities, a.features, a.depths)
        flat = list(patches)
        color, depth, alpha, last = torch.ops.ns_multigpu.rasterize_convexes(*inputs, *lists[:2], flat, TILE)
        rest = _Rest(inputs, lists[:2], flat, color, depth, alpha, last)
        if self.depth:
            color = torch.cat([color, depth[:, None]], dim=-1)
        return Drawn(color, alpha if mark_stops else alpha.abs(), last, rest)

    def draw_back(self, drawn: Drawn, v_color: Tensor, v_alpha: Tensor, sinks: Sinks) -> None:
        rest: _Rest = drawn.rest
        *found, _ = torch.ops.ns_multigpu.rasterize_convexes_backward(
            *rest.inputs, *rest.lists, rest.patches, TILE, rest.color, rest.depth, rest.alpha, rest.last, v_color,
            torch.zeros_like(rest.depth), v_alpha,
        )  # fmt: skip
        records = self.layout.records_of(ConvexGradients(*found))
        add_records(records, sinks.addresses, sinks.owners, sinks.slots, sinks.system_scope)
