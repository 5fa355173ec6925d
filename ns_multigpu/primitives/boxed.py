"""Primitives whose rows are bounded on the screen by a box alone, and which have their own raster operators."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_layout import RowLayout
from cuda_ext.ops.raster.primitives import BoxedOperators, box_lists
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.types import TILE, Hits, Patch, Pixels, Points, Splats, View, stack_intrinsics, stack_viewmats
from ns_multigpu.primitives.canvas import Canvas, clip_lists
from ns_multigpu.primitives.composed_kernels import MADE
from ns_multigpu.primitives.gaussians.functions import sizes_of
from ns_multigpu.primitives.radius_clip import clip_rows
from ns_multigpu.primitives.shading import row_colors


@dataclass(frozen=True)
class BoxedPrimitive(Primitive):
    """Primitive whose rows only a box bounds. A subclass defines how points become rows.

    Attributes:
        layout: columns of rows.
        operators: of its rows.
        sh_degree: harmonics in use now, 0 to 3; None for plain colours.
        depth: render expected depth as well: of the depths of centres.
        near, far: depths of centres beyond which nothing is drawn.
        radius_clip: half extents in pixels up to which a splat is not drawn; see `clip_rows`.
    """

    sh_degree: int | None = 3
    depth: bool = False
    near: float = 0.01
    far: float = 1e10
    radius_clip: float = 0.0

    layout: ClassVar[RowLayout]
    operators: ClassVar[BoxedOperators[Any, Any]]

    @abstractmethod
    def columns(self, points: Points) -> tuple[Tensor, ...]:
        """Return the points' columns as `operators` project them."""

    @abstractmethod
    def overlapping(self, points: Points, viewmat: Tensor, K: Tensor, size: Sequence[int]) -> Tensor:
        """Return a mask [N] of the points that may be visible in a complete view.

        Args:
            viewmat: [4, 4]. K: [3, 3], or [7, 3] with a lens. size: width and height, pixels.
        """

    @torch.no_grad()
    def cull(self, points: Points, views: Sequence[View], wanted: Sequence[int]) -> Hits:
        """See `Primitive.cull`: the points `overlapping` each view."""
        nothing = torch.empty(0, dtype=torch.int32, device=points.params["means"].device)
        found = [(nothing, nothing)]
        for v in wanted:
            mask = self.overlapping(points, views[v].viewmat, views[v].K, sizes_of([views[v]]))
            ids = mask.nonzero()[:, 0].int()
            found.append((torch.full_like(ids, v), ids))
        view_ids, point_ids = (torch.cat(column) for column in zip(*found, strict=True))
        return Hits(view_ids, point_ids)

    def project(
        self, points: Points, view_ids: Tensor, point_ids: Tensor, viewmats: Tensor, Ks: Tensor, sizes: Sequence[int]
    ) -> Any:
        """Return the screen geometry of rows, see `BoxedOperators.project`."""
        cameras = (viewmats, Ks, sizes)
        rows = self.operators.project(self.columns(points), *cameras, view_ids, point_ids, self.near, self.far)
        return clip_rows(rows, self.radius_clip)

    def moved(self, rows: Any, probe: Tensor) -> Any:
        """Return the rows moved on the screen by the probe [M, 2], pixels."""
        return rows._replace(means2d=rows.means2d + probe)

    def extra(self, pixels: Any, canvas: Canvas, views: Sequence[View]) -> list[dict[str, Tensor]] | None:
        """Return further images of each patch, see `Pixels.extra`; None if there are none."""
        return None

    def splat(self, points: Points, hits: Hits, views: Sequence[View]) -> Splats:
        """See `Primitive.splat`. Rows are the columns of `layout` and `radii`; `features` [M, 3] are colours."""
        viewmats = stack_viewmats(views)
        cameras = (viewmats, stack_intrinsics(views), sizes_of(views))
        rows = self.project(points, hits.view_ids, hits.point_ids, *cameras)
        probe = torch.zeros_like(rows.means2d, requires_grad=torch.is_grad_enabled())
        made = self.moved(rows, probe)._asdict()
        made["colors"] = self.colors(points, hits.view_ids, hits.point_ids, viewmats)
        return Splats(hits, {name: made[MADE.get(name, name)] for name in (*self.layout.widths, "radii")}, probe)

    def render(
        self, splats: Splats, patches: Sequence[Patch], views: Sequence[View], *, stops: bool = False,
        windows: Tensor | None = None,
    ) -> list[Pixels]:  # fmt: skip
        """See `Primitive.render`."""
        rows, canvas = {MADE.get(name, name): value for name, value in splats.rows.items()}, Canvas(patches, views)
        drawn = self.operators.rows(*(rows[name] for name in (*self.operators.projected, "radii")))
        lists = clip_lists(box_lists(drawn, splats.hits.view_ids, canvas.flat, TILE), drawn.depths, windows)
        pixels = self.operators.rasterize(drawn, rows["colors"], *lists, canvas.flat, TILE)
        depths = canvas.cut(pixels.depths) if self.depth else None
        extra = self.extra(pixels, canvas, views)
        return canvas.pixels(canvas.cut(pixels.colors), pixels.alphas, depths, marked=True, stops=stops, extra=extra)

    def colors(self, points: Points, view_ids: Tensor, point_ids: Tensor, viewmats: Tensor) -> Tensor:
        """Return the colours [M, 3] of rows."""
        return row_colors(points.params, self.sh_degree, viewmats, view_ids, point_ids)
