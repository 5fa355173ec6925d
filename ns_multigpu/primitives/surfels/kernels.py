# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The operators of 2D Gaussians, as a step calls them, and the losses of what they show beside colours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.row_exchange import add_records
from cuda_ext.ops.surfels import GEOMETRY
from cuda_ext.reference.surfels import surfel_radii
from ns_multigpu.core.kernels import Cameras, Drawn, Lists, Sinks
from ns_multigpu.core.schema import names
from ns_multigpu.core.types import TILE, Patch, Pixels, Points, View
from ns_multigpu.primitives.composed_kernels import Lines
from ns_multigpu.primitives.part_kernels import PartKernels
from ns_multigpu.primitives.surfels.losses import TERMS
from ns_multigpu.primitives.surfels.rows import SURFEL_PARTS, ArrivedSurfels, SurfelGradients, SurfelRows
from ns_multigpu.primitives.surfels.schema import SCHEMA

if TYPE_CHECKING:
    from ns_multigpu.primitives.surfels.functions import Surfels


class MadeSurfels(NamedTuple):
    """What lines become: `SurfelProjection`, and colours [M, 3]."""

    means2d: Tensor
    transforms: Tensor
    normals: Tensor
    depths: Tensor
    row_opacities: Tensor
    radii: Tensor
    colors: Tensor


class _Rest(NamedTuple):
    """What the way back needs: the operator's inputs and outputs; of further losses, gradients by geometry and by what
    is covered."""

    inputs: tuple[Tensor, ...]
    lists: tuple[Tensor, Tensor]
    patches: list[int]
    color: Tensor
    geometry: Tensor
    alpha: Tensor
    last: Tensor
    v_geometry: Tensor | None = None
    v_covered: Tensor | None = None


@dataclass(frozen=True)
class SurfelKernels(PartKernels):
    """See `Kernels`.

    Attributes:
        kind: what its functions say of points.
        depth: `draw` blends depths too, as a fourth number of the colour; then there is no way back.
        losses: weights of further losses, by what each is of (`primitives.surfels.losses.TERMS`).
    """

    kind: "Surfels"
    depth: bool = False
    losses: Mapping[str, float] = field(default_factory=dict[str, float])

    parameters = names(SCHEMA)
    title = "2D Gaussians"
    layout = SURFEL_PARTS
    record_floats = SURFEL_PARTS.record_floats
    terms = tuple(TERMS)

    def made(self, params: Mapping[str, Tensor], cameras: Cameras, lines: Lines) -> MadeSurfels:
        points = Points(dict(params))
        found = self.kind.project(points, *lines, cameras.viewmats, cameras.Ks, cameras.sizes)
        colors = self.kind.colors(points, *lines, cameras.viewmats)
        colors = torch.where((found.radii > 0).all(-1, keepdim=True), colors, 0.0)
        return MadeSurfels(*found, colors)

    def shows(self, params: Mapping[str, Tensor], cameras: Cameras, lines: Lines) -> Tensor:
        points = Points(dict(params))
        found = self.kind.project(points, *lines, cameras.viewmats, cameras.Ks, cameras.sizes)
        # Of one view, and of points in their order.
        near = self.kind.reaches(points, cameras.viewmats[0], cameras.Ks[0], cameras.sizes)
        return (found.radii != 0).any(-1) & near

    def rows(self, made: MadeSurfels, lines: Lines, count: Tensor) -> SurfelRows:
        looks = (made.normals, made.row_opacities, made.colors, made.depths, made.radii)
        return SurfelRows(*lines, count, made.means2d, made.transforms, *looks)

    def returned(self, made: MadeSurfels, records: Tensor) -> list[tuple[Tensor, Tensor]]:
        g: SurfelGradients = self.layout.gradients_of(records)
        return [
            (made.means2d, g.means2d), (made.transforms, g.transforms), (made.normals, g.normals),
            (made.row_opacities, g.opacities), (made.colors, g.features), (made.depths, g.depths),
        ]  # fmt: skip

    def moved(self, made: MadeSurfels, records: Tensor) -> tuple[Tensor, Tensor]:
        """The centre's, as the published code counts it: see `Surfels.splat`."""
        transforms = made.transforms.detach()
        # Columns 2 and 5. A list of them would be copied to the GPU, which no graph can hold.
        by_third = self.layout.gradients_of(records).transforms[:, 2:6:3]
        return by_third * transforms[:, 8:], surfel_radii(transforms)

    def draw(self, arrived: ArrivedSurfels, lists: Lists, patches: Sequence[int], mark_stops: bool = False) -> Drawn:
        a = arrived
        inputs = (a.means2d, a.transforms, a.normals, a.opacities, a.features, a.depths)
        flat = list(patches)
        drawn = torch.ops.ns_multigpu.rasterize_surfels(*inputs, *lists[:2], flat, TILE)
        color, geometry, alpha, last = drawn
        # The image's loss wipes out what it does not need of `last`; other losses need more.
        rest = _Rest(inputs, lists[:2], flat, color, geometry, alpha, last.clone() if self.losses else last)
        if self.depth:
            color = torch.cat([color, geometry[:, :1]], dim=-1)
        return Drawn(color, alpha if mark_stops else alpha.abs(), last, rest)

    def shown(self, drawn: Drawn, view: View) -> dict[str, Tensor]:
        normals = drawn.rest.geometry[:, 1:4]
        # Not a product of matrices: that may be of lower precision on a GPU.
        return {"normals": (normals[:, :, None] * view.viewmat[:3, :3]).sum(1)}

    def more_losses(self, drawn: Drawn, patches: Sequence[Patch], views: Sequence[View], report: Tensor) -> Drawn:
        if not self.losses:
            return drawn
        rest: _Rest = drawn.rest
        with torch.enable_grad():
            geometry = rest.geometry.detach().requires_grad_()
            covered = rest.alpha.detach().abs().requires_grad_()
            start, total = 0, 0 * covered.sum()  # of no patches, too, there is a way back
            for patch in patches:
                x0, y0, x1, y1 = patch.rendered(views[patch.view])
                piece = slice(start, start + (y1 - y0) * (x1 - x0))
                start = piece.stop
                image = geometry[piece].view(y1 - y0, x1 - x0, GEOMETRY)
                pixels = _pixels(image, covered[piece].view(y1 - y0, x1 - x0, 1), patch, views[patch.view])
                share = sum(weight * TERMS[name](pixels, views[patch.view]) for name, weight in self.losses.items())
                report[patch.view].add_(share.detach())  # pyright: ignore[reportAttributeAccessIssue]
                total = total + share
            by_geometry, by_covered = torch.autograd.grad(
                total / len(views), [geometry, covered], allow_unused=True, materialize_grads=True
            )
        return replace(drawn, rest=rest._replace(v_geometry=by_geometry, v_covered=by_covered))

    def draw_back(self, drawn: Drawn, v_color: Tensor, v_alpha: Tensor, sinks: Sinks) -> None:
        rest: _Rest = drawn.rest
        v_geometry = torch.zeros_like(rest.geometry) if rest.v_geometry is None else rest.v_geometry
        v_covered = v_alpha if rest.v_covered is None else v_alpha + rest.v_covered
        means2d, transforms, normals, opacities, colors, depths = torch.ops.ns_multigpu.rasterize_surfels_backward(
            *rest.inputs, *rest.lists, rest.patches, TILE, rest.color, rest.geometry, rest.alpha, rest.last, v_color,
            v_geometry, v_covered,
        )  # fmt: skip
        records = self.layout.records_of(SurfelGradients(means2d, transforms, normals, opacities, colors, depths))
        add_records(records, sinks.addresses, sinks.owners, sinks.slots, sinks.system_scope)


def _pixels(geometry: Tensor, covered: Tensor, patch: Patch, view: View) -> Pixels:
    """What losses look at: [h, w, GEOMETRY] in camera space, as `Surfels.render` has it."""
    depth = geometry[..., :1] / covered.clamp(min=1e-10)
    normals = (geometry[..., 1:4, None] * view.viewmat[:3, :3]).sum(-2)
    extra = {"normals": normals, "distortion": geometry[..., 4:5]}
    return Pixels(patch, geometry[..., :3], covered, depth, extra=extra)
