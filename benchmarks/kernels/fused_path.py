"""The fused way through the operators, piece by piece, as `ns_multigpu.core.step.step` goes it."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.floors import TILE, Counts, count
from benchmarks.scenes.garden import DEGREE, Scene
from cuda_ext import SplatRows, intersect_capacity, splat_forward, splat_update
from cuda_ext.ops.optim.adam import adam_scalars
from ns_multigpu.core.step.step_settings import padded


class Lists(NamedTuple):
    """Result of `intersect_capacity`."""

    tile_offsets: Tensor
    row_ids: Tensor
    count: Tensor


class Pixels(NamedTuple):
    """Result of the operator `rasterize`."""

    out: Tensor
    alpha: Tensor
    last: Tensor
    state: Tensor


class Capacities(NamedTuple):
    """Capacities for rows and intersections."""

    rows: int
    intersections: int


def needed(scene: Scene) -> Capacities:
    """Return the capacities that training ends up with for this scene."""
    path = FusedPath(scene, Capacities(scene.points, 1))
    rows = path.splat()
    return Capacities(padded(int(rows.count)), padded(int(path.lists(rows).count)))


class FusedPath:
    """Renderer of a scene that returns an image's gradient to its rows. Allocations do not depend on the data.

    Args:
        scene: with one view.
        capacities: of rows and intersections.
        system_scope: add gradients with atomics that other GPUs see.
        absgrad: sum up absolute gradients as well.
        target: [H W, 3] what the image should be; by default the scene's.
    """

    def __init__(
        self,
        scene: Scene,
        capacities: Capacities,
        system_scope: bool = False,
        absgrad: bool = False,
        target: Tensor | None = None,
    ) -> None:
        self.scene, self.capacities = scene, capacities
        self._system_scope, self._absgrad = system_scope, absgrad
        self._patches = [0, 0, 0, scene.width, scene.height]
        device = scene.device
        self.records = torch.zeros(capacities.rows, 16, device=device)
        self._sinks = torch.tensor([self.records.data_ptr()], dtype=torch.int64, device=device)
        self._owners = torch.zeros(capacities.rows, dtype=torch.int32, device=device)
        self._slots = torch.arange(capacities.rows, dtype=torch.int32, device=device)
        self.target = scene.floats().view(-1, 3) if target is None else target
        self._v_alpha = torch.zeros(len(self.target), device=device)

    def splat(self, boxes: Tensor | None = None) -> SplatRows:
        s = self.scene
        return splat_forward(*s.raw(), s.viewmats, s.Ks, s.size, DEGREE, self.capacities.rows, boxes=boxes)

    def lists(self, rows: SplatRows) -> Lists:
        geometry = (rows.means2d, rows.conics, rows.opacities, rows.radii, rows.depths, rows.view_ids)
        return Lists(*intersect_capacity(*geometry, self._patches, TILE, self.capacities.intersections))

    def pixels(self, rows: SplatRows, lists: Lists) -> Pixels:
        return Pixels(*torch.ops.ns_multigpu.rasterize(*self._inputs(rows, lists), None))

    def image_gradient(self, pixels: Pixels) -> Tensor:
        """Return the gradient of the mean squared error against the target."""
        return (pixels.out - self.target) * (2 / self.target.numel())

    def backward(self, rows: SplatRows, lists: Lists, pixels: Pixels, v_out: Tensor) -> None:
        """Clear the records and sum the gradients there, through the table of sinks."""
        self.records.zero_()
        torch.ops.ns_multigpu.rasterize_backward_into(
            *self._inputs(rows, lists), *pixels[1:], pixels.out, v_out, self._v_alpha, self._absgrad, self._sinks,
            self._owners, self._slots, self._system_scope,
        )  # fmt: skip

    def local_backward(self, rows: SplatRows, lists: Lists, pixels: Pixels, v_out: Tensor) -> None:
        """Sum the gradients in the operator's own records and unpack them, as autograd does."""
        torch.ops.ns_multigpu.rasterize_backward(
            *self._inputs(rows, lists), *pixels[1:], pixels.out, v_out, self._v_alpha, self._absgrad
        )

    def forward(self) -> tuple[SplatRows, Lists, Pixels]:
        rows = self.splat()
        lists = self.lists(rows)
        return rows, lists, self.pixels(rows, lists)

    def both(self) -> tuple[SplatRows, Lists, Pixels]:
        """Run forward and backward. Gradients are added to `records`."""
        rows, lists, pixels = self.forward()
        self.backward(rows, lists, pixels, self.image_gradient(pixels))
        return rows, lists, pixels

    def counts(self) -> Counts:
        """See `benchmarks.kernels.floors`.

        Raises:
            RuntimeError: a capacity is too small.
        """
        rows, lists, pixels = self.forward()
        self.check_capacity(rows, lists)
        return count(self.scene.points, rows, lists.tile_offsets, lists.row_ids, pixels.last, self.scene.size)

    def check_capacity(self, rows: SplatRows, lists: Lists) -> None:
        """Raise RuntimeError if a capacity is too small: the figures would be meaningless."""
        met = Capacities(int(rows.count), int(lists.count))
        if met.rows > self.capacities.rows or met.intersections > self.capacities.intersections:
            raise RuntimeError(f"{met} were met, but the capacities are {self.capacities}.")

    def _inputs(self, rows: SplatRows, lists: Lists) -> tuple[object, ...]:
        splats = (rows.means2d, rows.conics, rows.opacities, rows.features)
        return (*splats, lists.tile_offsets, lists.row_ids, self._patches, TILE)


class FusedUpdate:
    """`splat_update` of a scene's parameters that leaves them where they are: the learning rate is zero.

    Attributes:
        exp_avgs: the first moments.

    Args:
        scene: with one view.
        remember: False: moments are the gradients of the last step alone, to be looked at. True: as in training.
    """

    def __init__(self, scene: Scene, remember: bool = True) -> None:
        self._scene = scene
        self.exp_avgs = [torch.zeros_like(p) for p in scene.raw()]
        self._exp_avg_sqs = [torch.zeros_like(p) for p in scene.raw()]
        line = adam_scalars(0.0, (0.9, 0.999) if remember else (0.0, 0.0), 1e-15, 1)
        self._scalars = torch.tensor([line] * len(self.exp_avgs), device=scene.device)

    def __call__(self, rows: SplatRows, records: Tensor, boxes: Tensor | None = None) -> None:
        s = self._scene
        moments = (self.exp_avgs, self._exp_avg_sqs, self._scalars)
        splat_update(s.raw(), *moments, s.viewmats, s.Ks, s.size, rows, records, DEGREE, boxes=boxes)
