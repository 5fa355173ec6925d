"""Step operators of 2D Gaussians, and losses of their normals and distortion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_layout import RowLayout
from cuda_ext.ops.raster.surfels import GEOMETRY
from cuda_ext.reference.surfels import surfel_radii
from ns_multigpu.core.kernels import Cameras, Drawn
from ns_multigpu.core.schema import names
from ns_multigpu.core.types import Patch, Pixels, View
from ns_multigpu.primitives.boxed_kernels import BoxedKernels, Composited
from ns_multigpu.primitives.composed_kernels import RowLines
from ns_multigpu.primitives.surfels.losses import TERMS
from ns_multigpu.primitives.surfels.schema import SCHEMA

if TYPE_CHECKING:
    from ns_multigpu.primitives.surfels.functions import Surfels


SURFEL_ROWS = RowLayout({"means2d": 2, "transforms": 9, "normals": 3, "opacities": 0, "features": 3, "depths": 0})


@dataclass(frozen=True)
class SurfelKernels(BoxedKernels):
    """Kernels of 2D Gaussians; see `BoxedKernels`.

    Attributes:
        losses: weights of losses of normals, distortion and normal maps, by name (`primitives.surfels.losses.TERMS`).
    """

    kind: "Surfels"
    losses: Mapping[str, float] = field(default_factory=dict[str, float])

    parameters = names(SCHEMA)
    title = "2D Gaussians"
    layout = SURFEL_ROWS

    def made(self, params: Mapping[str, Tensor], cameras: Cameras, lines: RowLines) -> Any:
        made = super().made(params, cameras, lines)
        return made._replace(colors=torch.where((made.radii > 0).all(-1, keepdim=True), made.colors, 0.0))

    def shows(self, params: Mapping[str, Tensor], cameras: Cameras, lines: RowLines) -> Tensor:
        points, found = self.projected(params, cameras, lines)
        # Of one view, and of points in their order.
        near = self.kind.overlapping(points, cameras.viewmats[0], cameras.Ks[0], cameras.sizes)
        return (found.radii != 0).any(-1) & near

    @property
    def keeps_last(self) -> bool:
        return bool(self.losses)

    def moved(self, made: Any, records: Tensor) -> tuple[Tensor, Tensor]:
        """Return the centres' gradients and radii as the published code counts them: see `Surfels.splat`."""
        transforms = made.transforms.detach()
        # Columns 2 and 5. A list of them would be copied to the GPU, which no graph can hold.
        by_third = self.layout.gradients_of(records)["transforms"][:, 2:6:3]
        return by_third * transforms[:, 8:], surfel_radii(transforms)

    def shown(self, drawn: Drawn, view: View) -> dict[str, Tensor]:
        normals = drawn.rest.extra[:, 1:4]
        # Not a product of matrices: that may be of lower precision on a GPU.
        return {"normals": (normals[:, :, None] * view.viewmat[:3, :3]).sum(1)}

    def more_losses(self, drawn: Drawn, patches: Sequence[Patch], views: Sequence[View], report: Tensor) -> Drawn:
        if not self.losses:
            return drawn
        rest: Composited = drawn.rest
        with torch.enable_grad():
            geometry = rest.extra.detach().requires_grad_()
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
        return replace(drawn, rest=rest._replace(v_extra=by_geometry, v_covered=by_covered))


def _pixels(geometry: Tensor, covered: Tensor, patch: Patch, view: View) -> Pixels:
    """Return the pixels for losses from [h, w, GEOMETRY] in camera space, in the form of `Surfels.render`."""
    depth = geometry[..., :1] / covered.clamp(min=1e-10)
    normals = (geometry[..., 1:4, None] * view.viewmat[:3, :3]).sum(-2)
    extra = {"normals": normals, "distortion": geometry[..., 4:5]}
    return Pixels(patch, geometry[..., :3], covered, depth, extra=extra)
