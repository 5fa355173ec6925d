"""The 2D Gaussian as a primitive (Huang et al. 2024, "2D Gaussian Splatting"), over the operators of `cuda_ext`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.raster.surfels import SURFELS, SurfelPixels, SurfelProjection
from cuda_ext.reference.projection import in_lens, is_lens
from cuda_ext.reference.surfels import surfel_radii
from ns_multigpu.core.types import Points, Splats, View
from ns_multigpu.primitives.boxed import BoxedPrimitive
from ns_multigpu.primitives.canvas import Canvas
from ns_multigpu.primitives.composed_kernels import refuse_options
from ns_multigpu.primitives.deterministic import rotations
from ns_multigpu.primitives.gaussians.functions import CUTOFF, extents_of
from ns_multigpu.primitives.surfels.kernels import SURFEL_ROWS, SurfelKernels
from ns_multigpu.primitives.surfels.schema import CHANNELS, SCHEMA

_DISC = CUTOFF / 2**0.5
"""Pixels to which the low-pass filter on the screen widens a splat, at most."""


@dataclass(frozen=True)
class Surfels(BoxedPrimitive):
    """2D Gaussians: flat, in the plane of their first two axes; the third is the normal.

    `Points.params` are those of `Gaussians`, with `scales` [N, 2]. Columns of rows: see `SurfelProjection`.

    Attributes:
        channels: of `CHANNELS`, what else is rendered, into `Pixels.extra`. Depths are gsplat 1.4.0's.

    Raises:
        ValueError: there is no channel of that name.
    """

    channels: tuple[str, ...] = ()

    schema = SCHEMA
    layout = SURFEL_ROWS
    operators = SURFELS
    shown = {"normals": 3}  # noqa: RUF012 - a class's, and never changed
    median = True

    def __post_init__(self) -> None:
        if unknown := [name for name in self.channels if name not in CHANNELS]:
            raise ValueError(f"2D Gaussians have no channel {unknown[0]!r}; they have {', '.join(CHANNELS)}.")

    def showing(self) -> "Surfels":
        """See `Primitive.showing`."""
        return replace(self, channels=tuple(self.shown))

    def with_median(self) -> "Surfels":
        """See `Primitive.with_median`."""
        return replace(self, channels=("median",))

    def extents(self, points: Points) -> Tensor:
        """See `extents_of`: of discs."""
        return extents_of(points, lambda some: rotations(some["quats"])[:, :, :2] * some["scales"].exp()[:, None, :])

    @torch.no_grad()
    def overlapping(self, points: Points, viewmat: Tensor, K: Tensor, size: Sequence[int]) -> Tensor:
        """See `BoxedPrimitive.overlapping`: points whose sphere, with the filter's disc, may overlap the frustum.

        With a lens they are those in its cone.

        Points next to the camera or across its plane have no bounded box on the screen, and would be tested in every
        tile.
        """
        means = points.params["means"].detach()
        half_extents = self.activated(points, "scales").detach().amax(-1) * CUTOFF
        seen = means @ viewmat[:3, :3].detach().T + viewmat[:3, 3].detach()
        if is_lens(K[None]):
            return in_lens(K[3:], seen, self.near, self.far)
        shown = (seen[:, 2] >= self.near * (1 - 1e-5)) & (seen[:, 2] <= self.far * (1 + 1e-5))
        for axis, length in enumerate(size):
            focal, center = K[axis, axis], K[axis, 2]
            # Planes through the camera and the image's borders, moved outward; distances from them, inward.
            for sign, border in ((1, -_DISC - 1), (-1, length + _DISC + 1)):
                inward = sign * (focal * seen[:, axis] + (center - border) * seen[:, 2])
                away = torch.sqrt(focal * focal + (center - border) ** 2)
                shown &= inward + half_extents * away * (1 + 1e-4) >= 0
        return shown

    def moved(self, rows: SurfelProjection, probe: Tensor) -> SurfelProjection:
        """See `BoxedPrimitive.moved`: the centre on the screen, as the published code and gsplat count it: by the third
        column of the transform, times the depth (gsplat's `gradient_2dgs`)."""
        moved = probe * rows.transforms[:, 8:].detach()
        still = torch.zeros_like(rows.transforms[:, :2])
        by = torch.cat([still, moved[:, :1], still, moved[:, 1:], still, still[:, :1]], dim=1)
        return rows._replace(transforms=rows.transforms + by)

    def extra(self, pixels: SurfelPixels, canvas: Canvas, views: Sequence[View]) -> list[dict[str, Tensor]]:
        """See `BoxedPrimitive.extra`.

        Of `channels`: `normals` [h, w, 3], the sum of the splats' normals by their weights, in world space;
        `distortion` [h, w, 1], world units; `median` [h, w, 1], the depth at which alpha passes one half.
        """
        images = {name: canvas.cut(getattr(pixels, name)) for name in self.channels}
        if "normals" in images:
            turns = [views[patch.view].viewmat[:3, :3] for patch in canvas.patches]
            images["normals"] = [image @ turn for image, turn in zip(images["normals"], turns, strict=True)]
        return [{name: some[k] for name, some in images.items()} for k in range(len(canvas.patches))]

    def kernels(self, **options: Any) -> SurfelKernels:
        """See `Primitive.kernels`: `depth`, and `losses`, see `SurfelKernels`.

        Raises:
            ValueError: an option is set that only 3D Gaussians' kernels support.
        """
        losses = options.pop("losses", {})
        refuse_options(options, SurfelKernels.title)
        return SurfelKernels(self, bool(options.get("depth")), losses)

    def columns(self, points: Points) -> tuple[Tensor, ...]:
        """See `BoxedPrimitive.columns`."""
        scales, opacities = self.activated(points, "scales"), self.activated(points, "opacities")
        return points.params["means"], points.params["quats"], scales, opacities.reshape(-1)


def screen_radii(splats: Splats) -> Tensor:
    """Return the screen sizes [M] in pixels for densification: gsplat 1.4.0's radius; see `Gaussians`'."""
    radii = splats.rows["radii"][:, 0]
    of_drawn = surfel_radii(splats.rows["transforms"])
    return torch.where(radii > 0, of_drawn, -radii.to(of_drawn.dtype))
