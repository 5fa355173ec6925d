"""A whole step of training sharded Gaussians: each rank projects its own, draws its bands of the batch's views from
everybody's, and brings gradients back to their owners (torch-dgx, section 4), in operators that read nothing back.

Every rank splats the points that it owns for all views, whole, and sends each row to the ranks in whose bands it shows
(`tile_rows`): with `TileSettings.groups` some while others are projected. What a rank renders it
renders with a halo of one row of tiles, so that the gradient of its own pixels is whole (`cuda_ext.band_loss`); what
arrives is ordered by owner and row, so that splats of equal depth blend as in `single`.

Capacities and their overflow are as in `fused_step`: a step for which there is not room on some rank changes nothing
anywhere, and all that follow wait until the host has looked and made room.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.adam import SCALARS
from cuda_ext.ops.band_loss import band_loss_into
from cuda_ext.ops.fused import SplatRows, splat_forward, splat_update
from cuda_ext.ops.lazy_adam import LazyAdam, splat_flush
from cuda_ext.ops.row_exchange import route_lines
from cuda_ext.ops.step_control import HEAD, step_gate, step_message
from ns_multigpu.core.placement import Plan
from ns_multigpu.core.types import Patch, View
from ns_multigpu.core.world import World
from ns_multigpu.primitives.fused_step import ORDER, flat, loss_weights, still
from ns_multigpu.primitives.gaussians import TILE
from ns_multigpu.primitives.selective import check_lazy
from ns_multigpu.primitives.tile_lists import GatheredLists, TileLists
from ns_multigpu.primitives.tile_rows import RowTransport
from ns_multigpu.primitives.tile_settings import TileSettings, TileStatus


class TileStep:
    """The step of one rank.

    `render` and `update`, in this order, are a step. Before them the caller fills the inputs in place.

    Args:
        params, moments, statistics: as `FusedStep`'s, of this rank's points.
        settings: see there.
        world: the ranks.
        transport: for `settings.rows`, `settings.segment` and `settings.words`.
        lazy: as `FusedStep`'s.
        lists: how each tile's splats are found; `GatheredLists` unless given.
        measure: called with the name of each part (project, send, sort, raster, loss, backward, return, update), gives
            a context to do it in. What leaves while other rows are projected is in `project`.

    Raises:
        ValueError: a selective step is to put steps off.

    Attributes:
        inputs: one vector that holds the next four, in this order.
        viewmats: [B, 4, 4] the batch's world-to-camera matrices. Ks: [B, 3, 3] its intrinsics.
        backgrounds: [B, 3]. scalars: [6, 8] Adam's.
        report: [B + 1] this rank's shares of the views' losses (summed over ranks they are the views', not divided by
            B), and a number that is finite where all gradients that arrived here are; `update` writes that. It is
            finite, too, where the step is not taken.
        rgb: this rank's renderings of the last step, one a patch, without halo [h, W, 3].
        tile_counts: [B, rows of tiles] int64, intersections in each row of tiles, over all ranks.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        moments: Mapping[str, tuple[Tensor, Tensor]],
        statistics: Mapping[str, Tensor],
        settings: TileSettings,
        world: World,
        transport: RowTransport,
        lazy: LazyAdam | None = None,
        lists: TileLists | None = None,
        measure: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext(),
    ) -> None:
        check_lazy(settings.selective, lazy)
        self._measure = measure
        self._lists = lists or GatheredLists(settings, world.rank)
        self.settings, self._world, self._transport, self._lazy = settings, world, transport, lazy
        self._params = [flat(name, params[name].detach()) for name in ORDER]
        self._moments = [[flat(name, moments[name][i]) for name in ORDER] for i in (0, 1)]
        self._statistics = dict(statistics)
        device, batch = self._params[0].device, settings.views
        parts = (16 * batch, 9 * batch, 3 * batch, len(ORDER) * SCALARS)
        self.inputs = torch.zeros(sum(parts), device=device)
        viewmats, Ks, backgrounds, scalars = self.inputs.split(parts)
        self.viewmats, self.Ks = viewmats.view(batch, 4, 4), Ks.view(batch, 3, 3)
        self.backgrounds, self.scalars = backgrounds.view(-1, 3), scalars.view(-1, SCALARS)
        self.report = torch.zeros(batch + 1, device=device)
        self.rgb: list[Tensor] = []
        self.tile_counts = torch.zeros(batch, settings.tile_rows, dtype=torch.int64, device=device)
        self._sizes = (settings.width, settings.height) * batch
        self._columns = -(-settings.width // TILE)
        self._place = torch.empty(world.size, settings.rows, dtype=torch.int32, device=device)
        self._counts = torch.empty(world.size, dtype=torch.int64, device=device)
        aside = settings.groups > 1 and device.type == "cuda"
        # Its blocks go first: behind those of a projection they would begin when that is done.
        self._side = torch.cuda.Stream(device, priority=-1) if aside else None
        self._still = still(device)
        self._status = torch.zeros(6, dtype=torch.int64, device=device)
        limits = [settings.rows, settings.segment, settings.intersections]
        self._limits = torch.tensor(limits, dtype=torch.int64, device=device)
        self._v_l1, self._v_ssim = loss_weights(settings.width, settings.height, batch, settings.ssim_lambda, device)

    @torch.no_grad()
    def render(self, plan: Plan, targets: Sequence[Tensor]) -> None:
        """Splats this rank's points, exchanges rows, draws this rank's bands, their loss and its gradient by the rows,
        and brings gradients back.

        Args:
            plan: `bands`' of a plan that is the same on all ranks.
            targets: of each of this rank's patches the image under its rendered rectangle [h, W, 3], uint8 or float.
        """
        s, world, transport, measure = self.settings, self._world, self._transport, self._measure
        views = [self._view(position) for position in range(s.views)]
        reach = [
            n
            for rank, patches in enumerate(plan)
            for patch in patches
            for n in (rank, patch.view, *patch.rendered(views[patch.view]))
        ]
        with measure("project"):
            rows = splat_forward(
                *self._params, viewmats=self.viewmats, Ks=self.Ks, sizes=self._sizes, degree=s.degree,
                capacity=s.rows, antialiased=s.antialiased, exp_avgs=self._moments[0], exp_avg_sqs=self._moments[1],
                lazy=self._lazy, stops=s.stops, reached=partial(self._leave, reach),
            )  # fmt: skip
        with measure("sort"):
            self._lists.begin(rows, views)
        with measure("send"):
            self._leave(reach, rows, max(s.stops, default=0), s.rows)
            if self._side is not None:
                torch.cuda.current_stream(world.device).wait_stream(self._side)
            arrived = transport.arrive(rows, self._counts, s.views)
        own = plan[world.rank]
        patches = [n for patch in own for n in (patch.view, *patch.rendered(views[patch.view]))]
        geometry = (arrived.means2d, arrived.conics, arrived.opacities)
        with measure("sort"):
            tile_offsets, row_ids, met = self._lists.finish(arrived, plan, views)
        inputs = (*geometry, arrived.features, tile_offsets, row_ids, patches, TILE)
        with measure("raster"):
            out, alpha, last, state = torch.ops.ns_multigpu.rasterize(*inputs, None)
        with measure("loss"):
            v_out, v_alpha = self._losses(out, alpha, last, own, views, targets)
        with measure("backward"):
            sinks = transport.sinks(arrived.owners, arrived.slots)
            torch.ops.ns_multigpu.rasterize_backward_into(
                *inputs, alpha, last, state, out, v_out, v_alpha, s.absgrad,
                sinks.addresses, sinks.owners, sinks.slots, sinks.system_scope,
            )  # fmt: skip
        with measure("return"):
            message = step_message(
                rows.count, self._counts, met, tile_offsets, self._bands(own, views), world.rank,
                s.views * s.tile_rows, self._columns,
            )  # fmt: skip
            self._rows = rows
            self._records, self._messages = transport.bring_back(self._place, rows.count, message)

    def _leave(self, reach: Sequence[int], rows: SplatRows, first: int, end: int) -> None:
        """Sends lines first to end off to the patches that they reach, behind what the device has been given so far."""
        looked_at = (rows.view_ids, rows.count, rows.means2d, rows.radii)
        with self._beside():
            route_lines(*looked_at, reach, first, end, self._place, self._counts)
            self._transport.leave(rows, self._place, first, end)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """A stream that goes on from here beside the current one, if there are groups; else that one itself.

        What is made on one and used on the other has to live until they have met, in `render`: memory that is let go is
        given to whoever asks next on the stream that it was made on. The rows are held by `render`, then by `_rows`;
        place and counts are the step's own; what routing itself needs is made on the side, and used nowhere else.
        """
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._world.device))
        with torch.cuda.stream(self._side):
            yield

    def _view(self, position: int) -> View:
        return View(self.viewmats[position], self.Ks[position], self.settings.width, self.settings.height, position)

    def _losses(
        self, out: Tensor, alpha: Tensor, last: Tensor, own: Sequence[Patch], views: Sequence[View],
        targets: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Sets rgb and this rank's losses; returns the gradients by out and alpha, and closes the halo in `last`."""
        s = self.settings
        self.report.zero_()
        self.rgb = []
        v_out, v_alpha = torch.empty_like(out), torch.empty_like(alpha)
        start = 0
        for patch, target in zip(own, targets, strict=True):
            _, top, _, bottom = patch.rendered(views[patch.view])
            first, end = patch.y0 - top, patch.y1 - top  # the band's own rows
            piece = slice(start, start + (bottom - top) * s.width)
            start = piece.stop
            rgb = out.new_empty(target.shape)
            # Nothing comes from the halo's pixels: the way back need not look at them, says `last`.
            band_loss_into(
                out[piece], alpha[piece], self.backgrounds[patch.view], target, (0, first, target.shape[1], end),
                self._v_l1, self._v_ssim, offset=s.ssim_lambda if patch.y0 == 0 else 0.0, scale=s.views,
                rgb=rgb, loss=self.report[patch.view], v_out=v_out[piece], v_alpha=v_alpha[piece], last=last[piece],
            )  # fmt: skip
            self.rgb.append(rgb[first:end])
        return v_out, v_alpha

    def _bands(self, own: Sequence[Patch], views: Sequence[View]) -> list[int]:
        """Where the rows of tiles of this rank's bands stand, without their halos: see `step_message`."""
        bands: list[int] = []
        start = 0
        for patch in own:
            _, top, _, bottom = patch.rendered(views[patch.view])
            line = patch.view * self.settings.tile_rows + patch.y0 // TILE
            tile = start + (patch.y0 - top) // TILE * self._columns
            bands += [line, tile, -(-(patch.y1 - patch.y0) // TILE)]
            start += -(-(bottom - top) // TILE) * self._columns
        return bands

    @torch.no_grad()
    def update(self) -> None:
        """Takes Adam's step and adds to the statistics, unless a capacity was or is exceeded on any rank."""
        s = self.settings
        rank, heads = self._world.rank, self._messages[:, :HEAD]
        *counts, sent = heads.unbind(1)
        scalars, real = step_gate(
            counts, self._limits, self._status, self.scalars, self._still, row_counts=self._rows.count,
            lazy=self._lazy, sent=sent[rank : rank + 1], work=self._messages[:, HEAD:], totals=self.tile_counts,
        )  # fmt: skip
        with self._measure("update"):
            splat_update(
                self._params, *self._moments, scalars=scalars, viewmats=self.viewmats, Ks=self.Ks, sizes=self._sizes,
                rows=self._rows._replace(count=real), gradients=self._records, degree=s.degree,
                antialiased=s.antialiased, absgrad=s.absgrad, grad2d=self._statistics.get("grad2d"),
                seen=self._statistics.get("count"), radii_max=self._statistics.get("radii"), selective=s.selective,
                opacity_weight=s.opacity_weight, scale_weight=s.scale_weight, lazy=self._lazy,
                witness=self.report[-1:],
            )  # fmt: skip

    def flush(self) -> None:
        """Takes the steps that were put off. All ranks do it."""
        if self._lazy is not None:
            splat_flush(self._params, self._moments[0], self._moments[1], self._lazy)

    @property
    def taken(self) -> Tensor:
        """[] bool on the device: whether the step of the last `update` was taken."""
        return self._status[4] == 0

    def status(self) -> TileStatus:
        """Waits for the device, says how far the steps have got, and starts counting anew."""
        done, rows, segment, intersections, full, sent = self._status.tolist()
        self._status.zero_()
        return TileStatus(done, rows, segment, intersections, full > 0, sent)
