"""A whole step of training Gaussians on whole views, in operators that read nothing back: culling to Adam's update.

Every rank holds all points and renders views of its own. What the ranks exchange are the gradients of the rows that
they drew, 92 bytes each, rather than a gradient of every parameter (236 bytes a point): each rank then takes the same
step from the same rows in the same order, so that replicas stay the same to the last bit.

The number of rows and of intersections with tiles is known on the device alone, so both have a capacity. Where one is
exceeded the step, and all that follow it, leave parameters, moments and statistics as they are (`Status.done` stops
counting); the host finds out when it looks, makes room, and takes them again.

A lazy step leaves the points that no rank drew for later (`cuda_ext.LazyAdam`): parameters and moments are what they
ought to be only after `flush`, for which there has to be one every 64 steps at least.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import cuda_ext
from cuda_ext.ops.adam import SCALARS
from cuda_ext.ops.fused import SplatRows, splat_forward, splat_update
from cuda_ext.ops.lazy_adam import LazyAdam, splat_flush
from cuda_ext.ops.step_control import step_gate
from ns_multigpu.core.collectives import all_gather_together
from ns_multigpu.core.world import World
from ns_multigpu.primitives.gaussians import TILE
from ns_multigpu.primitives.selective import check_lazy

ORDER = ("means", "quats", "scales", "opacities", "features_dc", "features_rest")
"""The names of a model's parameters in the order that the fused operators take them."""


@dataclass(frozen=True)
class StepSettings:
    """What a step depends on besides parameters and cameras; a change of any makes a new `FusedStep`.

    Attributes:
        width, height: of every view, pixels.
        views: how many this rank renders; the batch is that many on every rank.
        degree: harmonics in use.
        antialiased, absgrad: see `Gaussians`.
        ssim_lambda: see `photometric_loss`.
        rows, intersections: the capacities of a rank.
        selective: only points that a view of the batch draws, on any rank, take Adam's step; see `selective`.
        opacity_weight, scale_weight: see `splat_update`; of the whole model's sums.
    """

    width: int
    height: int
    views: int
    degree: int
    antialiased: bool
    absgrad: bool
    ssim_lambda: float
    rows: int
    intersections: int
    selective: bool = False
    opacity_weight: float = 0.0
    scale_weight: float = 0.0


@dataclass(frozen=True)
class Status:
    """How far the steps have got since the last look.

    Attributes:
        done: steps that were taken.
        rows, intersections: the most that any rank had in any of them, taken or not.
        full: whether a capacity was exceeded, or a lazy step waits for a flush; later steps have waited.
    """

    done: int
    rows: int
    intersections: int
    full: bool

    @property
    def needed(self) -> tuple[int, ...]:
        """What the capacities would have had to be."""
        return self.rows, self.intersections


class FusedStep:
    """The step of one rank.

    `render`, `exchange` and `update`, in this order, are a step; the first and the last can each be captured in a CUDA
    graph. Before them the caller fills the inputs in place. The batch's views are those of rank 0, then of rank 1, ...

    Args:
        params: the parameters by name, `ORDER`'s, each contiguous.
        moments: by name, Adam's exp_avg and exp_avg_sq: float32, or all of them bfloat16 (see `splat_update`).
        statistics: densification's `grad2d`, `count`, `radii`, [N] each, added to; empty to count nothing.
        settings: see there.
        world: the ranks.
        target_type: of `targets`.
        lazy: put off the steps of points that are not drawn, and keep them there (see `cuda_ext.LazyAdam`, also for
            which options of Adam). A step made anew before a flush goes on from that of the one before.

    Raises:
        ValueError: a selective step is to put steps off.

    Attributes:
        inputs: one vector that holds the next four, in this order.
        viewmats: [B, 4, 4] the batch's world-to-camera matrices. Ks: [B, 3, 3] its intrinsics.
        backgrounds: [V, 3] of this rank's views. scalars: [6, 8] Adam's, see `cuda_ext.ops.adam.AdamStep`.
        targets: [V, H, W, 3] input: this rank's images, uint8 or float in [0, 1].
        rgb: [V, H, W, 3] this rank's renderings of the last step.
        report: [V + 1] the losses of this rank's views, not divided by B, and a number that is finite where all
            gradients of this rank's rows are; `update` writes that. It is finite, too, where the step is not taken.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        moments: Mapping[str, tuple[Tensor, Tensor]],
        statistics: Mapping[str, Tensor],
        settings: StepSettings,
        world: World,
        target_type: torch.dtype = torch.uint8,
        lazy: LazyAdam | None = None,
    ) -> None:
        check_lazy(settings.selective, lazy)
        self.settings, self._world = settings, world
        self._params = [flat(name, params[name].detach()) for name in ORDER]
        self._moments = [[flat(name, moments[name][i]) for name in ORDER] for i in (0, 1)]
        self._statistics = dict(statistics)
        device = self._params[0].device
        self._lazy = lazy
        batch = settings.views * world.size
        parts = (16 * batch, 9 * batch, 3 * settings.views, len(ORDER) * SCALARS)
        self.inputs = torch.zeros(sum(parts), device=device)
        viewmats, Ks, backgrounds, scalars = self.inputs.split(parts)
        self.viewmats, self.Ks = viewmats.view(batch, 4, 4), Ks.view(batch, 3, 3)
        self.backgrounds, self.scalars = backgrounds.view(-1, 3), scalars.view(-1, SCALARS)
        shape = (settings.views, settings.height, settings.width, 3)
        self.targets = torch.zeros(shape, dtype=target_type, device=device)
        self.rgb = torch.zeros(0, device=device)
        self.report = torch.zeros(settings.views + 1, device=device)
        self._records = torch.zeros(settings.rows, 16, device=device)
        self._sinks = torch.tensor([self._records.data_ptr()], dtype=torch.int64, device=device)
        self._owners = torch.zeros(settings.rows, dtype=torch.int32, device=device)
        self._slots = torch.arange(settings.rows, dtype=torch.int32, device=device)
        if world.group is not None:
            self._counts = torch.zeros(2, dtype=torch.int64, device=device)
            self._view_ids = torch.zeros(settings.rows, dtype=torch.int32, device=device)
            self._everyone = room_for_all(world.size, settings.rows, device)
            self._bright = torch.ones(world.size * settings.rows, 3, device=device)
        # A step that must not count takes Adam's with these: moments keep, and nothing moves.
        self._still = still(device)
        self._status = torch.zeros(4, dtype=torch.int64, device=device)  # done, rows, intersections, full
        limits = [settings.rows, settings.intersections]
        self._limits = torch.tensor(limits, dtype=torch.int64, device=device)
        self._v_l1, self._v_ssim = loss_weights(settings.width, settings.height, batch, settings.ssim_lambda, device)

    @torch.no_grad()
    def render(self) -> None:
        """Renders this rank's views, their loss, and its gradient by the rows."""
        s = self.settings
        first = self._world.rank * s.views
        own = slice(first, first + s.views)
        rows = splat_forward(
            *self._params,
            viewmats=self.viewmats[own],
            Ks=self.Ks[own],
            sizes=(s.width, s.height) * s.views,
            degree=s.degree,
            capacity=s.rows,
            antialiased=s.antialiased,
            exp_avgs=self._moments[0],
            exp_avg_sqs=self._moments[1],
            lazy=self._lazy,
        )
        patches = [n for v in range(s.views) for n in (v, 0, 0, s.width, s.height)]
        geometry = (rows.means2d, rows.conics, rows.opacities)
        tile_offsets, row_ids, met = cuda_ext.intersect_capacity(
            *geometry, rows.radii, rows.depths, rows.view_ids, patches, tile_size=TILE, capacity=s.intersections
        )
        inputs = (*geometry, rows.features, tile_offsets, row_ids, patches, TILE)
        out, alpha, last, state = torch.ops.ns_multigpu.rasterize(*inputs, None)
        losses, v_out, v_alpha = self._loss(out, alpha)
        self._records.zero_()
        torch.ops.ns_multigpu.rasterize_backward_into(
            *inputs, alpha, last, state, out, v_out, v_alpha, s.absgrad, self._sinks, self._owners, self._slots, False
        )
        self.report[:-1] = losses
        self._rows, self._met = rows, met
        if self._world.group is not None:
            # No gradient passes where a colour is clamped at black: applied here, the colours need not travel. This is
            # the way back of a ReLU, which is one kernel, in place, and leaves no NaN as a product with zero would.
            by_color = self._records[:, 6:9]
            torch.ops.aten.threshold_backward.grad_input(by_color, rows.features, 0, grad_input=by_color)
            torch.add(rows.view_ids, first, out=self._view_ids)
            torch.cat([rows.count, met], out=self._counts)

    def _loss(self, out: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sets rgb; returns the views' losses [V], and the gradients of the batch's mean loss by out and alpha."""
        s = self.settings
        pixels, batch = s.width * s.height, s.views * self._world.size
        self.rgb = out.new_empty(s.views, s.height, s.width, 3)
        losses, v_out, v_alpha = out.new_zeros(s.views), torch.empty_like(out), torch.empty_like(alpha)
        for v in range(s.views):
            part = slice(v * pixels, (v + 1) * pixels)
            cuda_ext.band_loss_into(
                out[part], alpha[part], self.backgrounds[v], self.targets[v], (0, 0, s.width, s.height),
                self._v_l1, self._v_ssim, offset=s.ssim_lambda, scale=batch,
                rgb=self.rgb[v], loss=losses[v], v_out=v_out[part], v_alpha=v_alpha[part],
            )  # fmt: skip
        return losses, v_out, v_alpha

    def exchange(self) -> None:
        """Brings every rank's rows and their gradients to every rank."""
        if self._world.group is not None:
            # The rows of the last `render`; if that was captured the graph's, which every replay fills anew. Records go
            # with the 4 of their 16 numbers that mean nothing: it is quicker than to take these out and put them back.
            rows = self._rows
            mine = [self._counts, self._view_ids, rows.point_ids, rows.radii, rows.conics, self._records]
            all_gather_together(self._everyone, mine, self._world)

    @torch.no_grad()
    def update(self) -> None:
        """Takes Adam's step and adds to the statistics, unless a capacity was or is exceeded on any rank."""
        s = self.settings
        if self._world.group is None:
            rows, records, counts = self._rows, self._records, [self._rows.count, self._met]
        else:
            rows, records, counts = self._gathered()
        scalars, real = step_gate(
            counts, self._limits, self._status, self.scalars, self._still, row_counts=counts[0], lazy=self._lazy
        )
        first = self._world.rank * s.views
        splat_update(
            self._params,
            *self._moments,
            scalars=scalars,
            viewmats=self.viewmats,
            Ks=self.Ks,
            sizes=(s.width, s.height) * len(self.viewmats),
            rows=rows._replace(count=real),
            gradients=records,
            degree=s.degree,
            antialiased=s.antialiased,
            absgrad=s.absgrad,
            grad2d=self._statistics.get("grad2d"),
            seen=self._statistics.get("count"),
            radii_max=self._statistics.get("radii"),
            selective=s.selective,
            opacity_weight=s.opacity_weight,
            scale_weight=s.scale_weight,
            lazy=self._lazy,
            witness=self.report[-1:],
            witness_views=range(first, first + s.views),
        )

    def flush(self) -> None:
        """Takes the steps that were put off; until the next step everything is as it ought to be. All ranks do it."""
        if self._lazy is not None:
            splat_flush(self._params, self._moments[0], self._moments[1], self._lazy)

    def _gathered(self) -> tuple[SplatRows, Tensor, list[Tensor]]:
        """All ranks' rows, a segment each; their gradients; and the ranks' counts of rows and of intersections."""
        counts, view_ids, point_ids, radii, conics, records = self._everyone
        none = self._bright.new_empty(0)
        rows = SplatRows(view_ids, point_ids, none, none, conics, none, self._bright, none, radii)
        return rows, records, list(counts.unbind(1))

    @property
    def taken(self) -> Tensor:
        """[] bool on the device: whether the step of the last `update` was taken."""
        return self._status[3] == 0

    def status(self) -> Status:
        """Waits for the device, says how far the steps have got, and starts counting anew."""
        done, rows, intersections, full = self._status.tolist()
        self._status.zero_()
        return Status(done, rows, intersections, full > 0)


def room_for_all(ranks: int, rows: int, device: torch.device) -> list[Tensor]:
    """What every rank sends: counts of rows and of intersections [ranks, 2]; and, a segment of `rows` a rank, view ids,
    point ids, radii, conics and records of gradients."""
    ints = [torch.zeros(ranks * rows, *shape, dtype=torch.int32, device=device) for shape in ((), (), (2,))]
    floats = [torch.zeros(ranks * rows, width, device=device) for width in (3, 16)]
    return [torch.zeros(ranks, 2, dtype=torch.int64, device=device), *ints, *floats]


def still(device: torch.device) -> Tensor:
    """[6, 8] scalars of a step of Adam that changes nothing."""
    return torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], device=device).repeat(len(ORDER), 1)


def loss_weights(
    width: int, height: int, batch: int, ssim_lambda: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The gradients [] of a batch's mean loss by the sums of a view's absolute differences and of its SSIM."""
    windows = (width - 10) * (height - 10)
    by_l1 = (1 - ssim_lambda) / (3 * batch * width * height)
    return torch.tensor(by_l1, device=device), torch.tensor(-ssim_lambda / (3 * batch * windows), device=device)


def flat(name: str, tensor: Tensor) -> Tensor:
    """Opacities are [N, 1] to an optimizer and [N] to the operators."""
    return tensor.view(-1) if name == "opacities" else tensor


def padded(count: int) -> int:
    """A capacity for `count` rows or intersections, with room to grow."""
    return max(1024, -(-int(count * 1.25) // 1024) * 1024)


def first_capacities(points: int, pixels: int, views: int) -> tuple[int, int]:
    """Capacities of rows and intersections to begin with, when nothing is known but the sizes.

    Args:
        points: the model's. pixels: of a view. views: that a rank renders.
    """
    tiles = -(-pixels // (TILE * TILE))
    return padded(points * views), padded(views * (4 * points + 16 * tiles))
