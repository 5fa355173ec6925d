"""Records of a step: points, views, patches, splats and pixels.

All are frozen: a stage returns a new record instead of changing the one it was given.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.observations import Observations

TILE = 16
"""Side of a rasterizer's tile in pixels."""
Sizes = tuple[tuple[int, int], ...]
"""Width and height of each view of a batch, in pixels."""
FAR = 1e10
"""Largest depth that is drawn without a far plane, world units."""
SSIM_HALO = 5
"""Pixels that an 11 x 11 SSIM window extends beyond its centre: the halo that a patch needs to have an exact loss."""


@dataclass(frozen=True)
class View:
    """A camera of the step's batch.

    Attributes:
        viewmat: [4, 4] world-to-camera matrix, OpenCV axes (x right, y down, z forward).
        K: [3, 3] intrinsics in pixels; the centre of the top left pixel is (0.5, 0.5). [7, 3] with a lens, which all
            views of a step then have: see `cuda_ext.ops.project.lens`.
        width, height: the image's size in pixels.
        index: the view's number in its capture; keys everything random that belongs to the view.
        time: the moment of a time-varying capture, in [0, 1].
        observations: points that it observes, for a loss of depth; None if unused.
        normals: pixels of its normal map, for a loss of normals; None if unused.
    """

    viewmat: Tensor
    K: Tensor
    width: int
    height: int
    index: int = 0
    time: float = 0.0
    observations: Observations | None = None
    normals: Observations | None = None


@dataclass(frozen=True)
class Patch:
    """A rectangle of a view: columns [x0, x1), rows [y0, y1), in pixels, with a halo rendered around it.

    The halo's pixels feed the loss's windows and no loss term of their own: neighbouring patches overlap in them, and
    the sum over patches is still the whole image's.

    Attributes:
        view: the view's position in the step's list of views.
        halo: pixels to render beyond the rectangle, where the image has them.
        cell: where views are drawn cell by cell, that whose points are drawn.
    """

    view: int
    x0: int
    y0: int
    x1: int
    y1: int
    halo: int = 0
    cell: int = 0

    def rendered(self, view: View) -> tuple[int, int, int, int]:
        """Return the rectangle (x0, y0, x1, y1) to render: with the halo, clipped to the image."""
        if self.x0 >= self.x1 or self.y0 >= self.y1:
            return (self.x0, self.y0, self.x0, self.y0)
        return (
            max(self.x0 - self.halo, 0),
            max(self.y0 - self.halo, 0),
            min(self.x1 + self.halo, view.width),
            min(self.y1 + self.halo, view.height),
        )

    def inner(self, view: View) -> tuple[int, int, int, int]:
        """Return the rectangle without its halo, in the coordinates of the rendered one."""
        left, top, _, _ = self.rendered(view)
        return (self.x0 - left, self.y0 - top, self.x1 - left, self.y1 - top)

    @staticmethod
    def whole(position: int, view: View) -> "Patch":
        """Return the patch that covers all of `view`."""
        return Patch(position, 0, 0, view.width, view.height)


@dataclass(frozen=True)
class Points:
    """The points that this rank holds.

    Attributes:
        params: named parameters, each [N, ...]; what they mean is the primitive's business.
    """

    params: Mapping[str, Tensor]

    def __len__(self) -> int:
        return next(iter(self.params.values())).shape[0]


@dataclass(frozen=True)
class Hits:
    """Points that may be visible in views: one row per (view, point), views ascending, then points ascending.

    The order of the rows breaks ties in depth, so it must not depend on who computed them.

    Attributes:
        view_ids: [M] int32, positions in the step's list of views.
        point_ids: [M] int32, rows of `Points`; where points are sharded, for rows that came from their owners, numbers
            that count all points rank by rank (see `Sharded`).
    """

    view_ids: Tensor
    point_ids: Tensor

    def __len__(self) -> int:
        return self.view_ids.shape[0]


@dataclass(frozen=True)
class Splats:
    """Points as seen by views: one row per hit, in the hits' order.

    Attributes:
        hits: where each row comes from.
        rows: named tensors, each [M, ...]; what crosses the wire when splats are exchanged.
        probe: [M, 2], zero; its gradient is the densifier's statistic of the row (see the primitive).
        probe_rendered: True if `Primitive.render` gives the probe its gradient, and it must be exchanged with the rows;
            else it has one through the rows that it was added to.
    """

    hits: Hits
    rows: Mapping[str, Tensor]
    probe: Tensor | None = None
    probe_rendered: bool = False

    def __len__(self) -> int:
        return len(self.hits)


@dataclass(frozen=True)
class Pixels:
    """A rendered patch, its halo included, without background.

    Attributes:
        patch: which one; `patch.rendered(view)` is the rectangle that the tensors cover.
        color: [h, w, 3] colour, premultiplied by alpha.
        alpha: [h, w, 1] opacity.
        depth: [h, w, 1] expected depth, or None if it was not asked for.
        stops: [h, w, 1] bool, where drawing stopped before a splat, so that splats behind were skipped; None if it
            was not asked for.
        extra: [h, w, C] each, what else the primitive was asked to render, by its names.
    """

    patch: Patch
    color: Tensor
    alpha: Tensor
    depth: Tensor | None = None
    stops: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class Rendering:
    """Result of rendering a batch on one rank.

    Attributes:
        pixels: this rank's patches.
        splats: the splats of the points that this rank holds: which receive densification statistics. A rank without
            pixels makes its loss depend on their rows, for backward is where the ranks exchange gradients.
    """

    pixels: Sequence[Pixels]
    splats: Splats


@dataclass
class Traffic:
    """Bytes that this rank has sent to other ranks. Payload only: what a ring algorithm sends, no headers.

    Attributes:
        sent: in all. between: of these, to ranks of other machines.
        measured: encloses each exchange of splats, or of their gradients, to time it.
    """

    sent: int = 0
    between: int = 0
    marks: dict[str, int] = field(default_factory=dict[str, int])
    measured: Callable[[], AbstractContextManager[Any]] = nullcontext

    def add(self, count: int, between: int = 0) -> None:
        """Count `count` bytes as sent, `between` of them to other machines."""
        self.sent += count
        self.between += between

    def since(self, mark: str) -> int:
        """Return the bytes sent since the last call with the same `mark`."""
        before = self.marks.get(mark, 0)
        self.marks[mark] = self.sent
        return self.sent - before

    def between_since(self, mark: str) -> int:
        """Return the bytes sent to other machines since the last call with the same `mark`."""
        name = f"between {mark}"
        before = self.marks.get(name, 0)
        self.marks[name] = self.between
        return self.between - before

    @contextmanager
    def apart(self, mark: str) -> Generator[None]:
        """Exclude traffic of the enclosed code from `mark`."""
        sent, between = self.sent, self.between
        yield
        for name, extra in ((mark, self.sent - sent), (f"between {mark}", self.between - between)):
            self.marks[name] = self.marks.get(name, 0) + extra


def sizes_of(views: Sequence[View]) -> Sizes:
    """Return the views' sizes."""
    return tuple((view.width, view.height) for view in views)


def stack_viewmats(views: Sequence[View]) -> Tensor:
    """Return [V, 4, 4] world-to-camera matrices. Gradients flow back to each view's."""
    return torch.stack([view.viewmat for view in views])


def stack_intrinsics(views: Sequence[View]) -> Tensor:
    """Return [V, 3, 3] intrinsics, or [V, 7, 3] with lenses."""
    return torch.stack([view.K for view in views])
