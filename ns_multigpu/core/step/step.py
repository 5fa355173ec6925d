"""The training step: from points to pixels and loss, and back to points updated by Adam.

    points -> project -> rows -> [exchange rows] -> lists -> draw -> [exchange pixels] -> loss on the pixels owned here
    and back: loss -> [return pixels' gradients] -> draw back -> [return rows' gradients] -> gate -> update

A strategy defines drawing ranks and exchanges; a primitive's kernels define rows. The host launches a step without the
numbers of rows and intersections. Only collectives read how many rows to send. Both have a capacity. If one is exceeded
on any rank, this step and the following ones change no parameters, moments and statistics on any rank (`Status.done`
stops counting). The host detects that at the next readback, grows the capacity and retries the steps. With
`StepSettings.skips` a gradient that is not finite has the same effect; the host then skips that step.

Each patch is drawn with a halo of one tile, which the SSIM gradient of its own pixels needs (`band_loss_into`).
Received rows are ordered by owner and row, so that splats of equal depth blend as in `single`.

A lazy step defers the update of points that no rank drew (`cuda_ext.LazyAdam`). Parameters and moments are then valid
only after `flush`, which is required every 64 steps at least.

In a large model whole groups of points are culled by a box (`cuda_ext.ops.project.boxes`). Steps update the boxes. Call
`refresh` after changing points by other means.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import SCALARS
from cuda_ext.ops.optim.lazy_adam import LazyAdam
from cuda_ext.ops.optim.step_control import HEAD, step_gate
from ns_multigpu.core.assign.assignment import Feedback
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.exchange.pixel_operators import OwnedPixels
from ns_multigpu.core.exchange.transport import Parts, Transport, begun, launched
from ns_multigpu.core.kernels import Cameras, Drawn, Kernels, Sinks
from ns_multigpu.core.observations import Observations
from ns_multigpu.core.step.bilateral_grids import StepGrids
from ns_multigpu.core.step.exposures import StepExposures
from ns_multigpu.core.step.forward_pass import ForwardPass, Gathered
from ns_multigpu.core.step.fused_support import follow_each_other, unsupported_reason
from ns_multigpu.core.step.nonfinite import NonFiniteSteps
from ns_multigpu.core.step.patch_losses import PatchLosses, share_of_mse
from ns_multigpu.core.step.poses import StepPoses
from ns_multigpu.core.step.step_settings import GROUPS_FROM, Status, StepSettings
from ns_multigpu.core.step.step_statistics import StepMessage
from ns_multigpu.core.step.tile_lists import GatheredLists, TileLists
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import Sizes, View, sizes_of


class Step:
    """The step of one rank.

    `parts` are a step; `take` takes one as it is. Before it the caller fills the inputs in place.

    Args:
        kernels: the primitive's.
        params: the parameters by name, those of this rank's points, each contiguous.
        moments: by name, Adam's exp_avg and exp_avg_sq: float32, or all of them bfloat16 (see `splat_update`).
        statistics: see `Model`.
        settings: see there.
        strategy: how the step is spread. Views that it splats points for follow each other in the batch.
        transport: for `settings.rows`, `settings.segment` and `settings.words`; of `make_transport`.
        lazy: defer the steps of points that are not drawn (see `cuda_ext.LazyAdam`, also for
            which options of Adam). A step rebuilt before a flush goes on from that of the one before.
        lists: how each tile's splats are found; `GatheredLists` unless given.
        measure: called with the name of each part (project, send, sort, raster, pixels, loss, backward, return,
            update), gives a context to do it in.
        observed: what the batch's views observe [B, K], by the name of the attribute of `View`, where there are losses
            of it; filled as inputs are.
        exposures, grids: the views' gains, or their bilateral grids: at most one of the two. Their Adam has the line
            of `scalars` behind those of the parameters.
        poses: corrections of the views' poses. Their Adam has the last line.

    Raises:
        ValueError: no step supports the strategy's legs, or lazy steps are not supported.

    Attributes:
        inputs: one vector that holds the next five, in this order.
        viewmats: [B, 4, 4] the batch's world-to-camera matrices, uncorrected. Ks: [B, 3 or 7, 3] its intrinsics.
        backgrounds: [B, 3]. times: [B] the views', see `View.time`.
        scalars: [parameters (+ 1 of gains or grids, + 1 of poses), 8] Adam's, see `adam_scalars` in
            `cuda_ext.ops.optim.adam`. With any of these the views' indices follow the times, [B].
        report: [B + 1] this rank's shares of the views' losses (summed over ranks they are the views', not divided by
            B), and the finite flag: NaN or infinity if the step was taken and a gradient of a row drawn or received
            here was not finite. With `settings.skips` it is NaN on all ranks if the step is skipped.
        rgb: this rank's renderings of the last step, one a patch, without halo [h, w, 3].
        measured_work: int64, input of `Assignment.learn`, `Assignment.counts` numbers a rank or, where
            they are added up over ranks, in all.
    """

    def __init__(
        self,
        kernels: Kernels,
        params: Mapping[str, Tensor],
        moments: Mapping[str, tuple[Tensor, Tensor]],
        statistics: Mapping[str, Tensor],
        settings: StepSettings,
        strategy: Strategy,
        transport: Transport,
        lazy: LazyAdam | None = None,
        lists: TileLists | None = None,
        measure: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext(),
        group_culling: bool | None = None,
        observed: Mapping[str, Observations] | None = None,
        exposures: StepExposures | None = None,
        grids: StepGrids | None = None,
        poses: StepPoses | None = None,
    ) -> None:
        reason = unsupported_reason(strategy, settings.views)
        if reason is not None:
            raise ValueError(f"strategy {strategy.name}: {reason}.")
        self.settings, self._strategy, self._world = settings, strategy, strategy.world
        self._kernels, self._transport, self._measure, self._observed = kernels, transport, measure, observed or {}
        model = kernels.model(params, moments, statistics, lazy)
        tests = len(model.params[0]) * strategy.assignment.most_views(settings.views, strategy.world.size)
        grouped = tests >= GROUPS_FROM if group_culling is None else group_culling
        self._model = replace(model, boxes=kernels.boxes(model)) if grouped else model
        self.refresh()
        self._learns = strategy.assignment.learns
        device, batch, count = self._model.params[0].device, settings.views, len(kernels.parameters)
        self._device = device
        of_views = exposures or grids
        assert (0 if of_views is None else of_views.now[0].numel()) == settings.view_numbers, "messages include them"
        assert (poses is not None) == settings.poses
        self._of_views, self._poses, lines = of_views, poses, count + (of_views is not None) + settings.poses
        cameras, indices_of = (16 * batch, 3 * settings.intrinsics_rows * batch), batch * settings.has_indices
        parts = (*cameras, 3 * batch, lines * SCALARS, batch, indices_of)
        self.inputs = torch.zeros(sum(parts), device=device)
        viewmats, Ks, backgrounds, scalars, self.times, indices = self.inputs.split(parts)
        if of_views is not None:
            of_views.indices = indices
        self.viewmats, self.Ks = viewmats.view(batch, 4, 4), Ks.view(batch, -1, 3)
        self._viewmats = self.viewmats
        if poses is not None:
            poses.indices, poses.given, self._viewmats = indices, self.viewmats, poses.viewmats
        self.backgrounds, self.scalars = backgrounds.view(-1, 3), scalars.view(-1, SCALARS)
        self.report = torch.zeros(batch + 1, device=device)
        self.rgb: list[Tensor] = []
        ranks, is_exchanged = self._world.size, transport.is_exchanged
        self._ends = transport.words - settings.tail  # words of the views' parameters follow the step statistics
        counts = self._ends - HEAD
        shape = (counts,) if self._learns is Feedback.WORK else (ranks, counts)
        self.measured_work = torch.zeros(shape, dtype=torch.int64, device=device)
        lists = lists or GatheredLists(kernels, settings.intersections)
        self._capturable = lists.capturable
        self._forward = ForwardPass(strategy, kernels, transport, lists, settings.rows, measure)
        numbers = len(transport.capacities)
        # Adam scalars of a skipped step: they change nothing.
        self._still = scalars_of_no_step(lines, device)
        # Progress of the steps and the maximum of each count: one vector, for one readback.
        self._readback = torch.zeros(7 + numbers, dtype=torch.int64, device=device)
        self._status, self._most = self._readback[:7], self._readback[7:]
        capacities = transport.capacities if is_exchanged else [0] * numbers
        self._capacities = torch.tensor(capacities, dtype=torch.int64, device=device)
        # Of own rows, rows beyond a segment's capacity, intersections, and ranks with a gradient that is not finite.
        limits = [settings.rows, 0, settings.intersections, 0]
        self._limits = torch.tensor(limits, dtype=torch.int64, device=device)
        self._nonfinite = NonFiniteSteps(self._world, self._kernels.gradient_floats, skips=settings.skips)
        self._losses = PatchLosses(settings, self.backgrounds, self.report, exposures, grids)
        self._message = StepMessage(
            settings, self._forward.pixels, transport.local_index, transport.words, self._learns
        )

    @property
    def capturable(self) -> bool:
        """True if CUDA graphs can hold what lies between the collectives of `parts`."""
        return self._capturable

    def take(self, plan: Plan, targets: Sequence[Tensor], sizes: Sizes | None = None) -> None:
        """Run a step without capture. Arguments as `parts`'."""
        self.rgb = launched(self.parts(plan, targets, sizes))

    @torch.no_grad()
    def parts(self, plan: Plan, targets: Sequence[Tensor], sizes: Sizes | None = None) -> Parts[list[Tensor]]:
        """Run one training step, in parts.

        Splats this rank's points, exchanges rows, draws this rank's patches and computes their loss. Then returns
        gradients, applies Adam and adds to the statistics. If a capacity is exceeded on any rank, or was in an earlier
        step, points and statistics do not change.

        Args:
            plan: `with_halos` of a plan that is the same on all ranks.
            targets: of each of the patches that this rank owns the photograph under its rendered rectangle
                [h, w, channels], uint8 or float; see `PatchLosses.photograph`.
            sizes: of the batch's views; the settings' for all unless given.

        Returns:
            what `rgb` is to be.
        """
        self.rgb = []  # the memory of the last step's renderings is this one's
        for trained in (self._of_views, self._poses):
            if trained is not None:
                trained.begin()
        s, world, kernels, transport, measure = (
            self.settings, self._world, self._kernels, self._transport, self._measure
        )  # fmt: skip
        views = self.views(sizes)
        splatted = self._splatted(plan)
        rows = self._forward.project(self._model, self._cameras(splatted, views), views)
        self.report.zero_()
        gathered = yield from self._forward.gather(rows, views, plan, splatted)
        rgb = yield from self._draw(gathered, plan, views, targets, splatted.start)
        with measure("message"):
            numbers, own = (self._forward.counts, self._capacities, self._most), plan.drawn[world.rank]
            message = self._message.of(rows, numbers, plan, gathered.lists, views, own, splatted.start, self._of_views)
        del gathered  # its memory is the update's
        with measure("return"):
            back = yield from transport.return_gradients(rows, self._forward.place, message, splatted)
        with measure("update"):
            heads, work = back.messages[:, :HEAD], back.messages[:, HEAD : self._ends]
            *counts, sent = heads.unbind(1)
            summed = self._learns is Feedback.WORK
            if self._learns in (Feedback.NEEDS, Feedback.LIVE):
                self.measured_work.copy_(work)
            more = yield from self._nonfinite.agree(back, counts, self._limits, back.messages[:, self._ends :])
            scalars, real = step_gate(
                [*counts, self._nonfinite.by_rank], self._limits, self._status, self.scalars, self._still,
                row_counts=back.rows.count, lazy=self._model.lazy, sent=sent[world.rank : world.rank + 1],
                work=work if summed else None, totals=self.measured_work if summed else None,
            )  # fmt: skip
            rows = back.rows._replace(count=real)
            count = len(kernels.parameters)
            whole = splatted if back.finite_flag_views is None else range(s.views)
            cameras = self._cameras(whole, views)
            if self._of_views is not None:
                self._of_views.step(more, scalars[count : count + 1])
            v_viewmats = None if self._poses is None else self._poses.v_viewmats[whole.start : whole.stop]
            kernels.update(
                self._model, cameras, scalars[:count], rows, back.records, self.report[-1:], back.finite_flag_views,
                v_viewmats,
            )  # fmt: skip
            self._nonfinite.mark(self.report[-1:])
        if self._poses is not None:
            yield from self._poses.step(scalars[-1:])
        return rgb

    def _draw(
        self, gathered: Gathered, plan: Plan, views: Sequence[View], targets: Sequence[Tensor], first_view: int
    ) -> Parts[list[Tensor]]:
        """Draw this rank's patches, compute their loss, and add the gradients of their rows to the transport's sinks;
        return the new `rgb`. The plans of `PixelOperators.split` overlap: one is exchanged while another is drawn.

        Args:
            plan, targets: see `parts`. first_view: position in the batch of the first view of the rows.
        """
        kernels, pixels, measure = self._kernels, self._forward.pixels, self._measure
        plans, tile, rgb = pixels.split(plan), 0, list[Tensor]()
        drawn, exchanges, returns = list[Drawn](), list[Parts[OwnedPixels]](), list[Parts[tuple[Tensor, Tensor]]]()
        for some in plans:
            one, tile = self._forward.draw(gathered, some, views, first_view, tile)
            with measure("pixels"):
                exchanges.append((yield from begun(pixels.exchange(one, some, views))))
            drawn.append(one)
        for k, some in enumerate(plans):
            with measure("pixels"):
                seen = yield from exchanges[k]
            with measure("loss"):
                owned = some.owned[self._world.rank]
                of_these = targets[len(rgb) : len(rgb) + len(owned)]
                shown, v_color, v_alpha = self._losses.add(seen, owned, views, of_these)
                drawn[k] = kernels.more_losses(drawn[k], owned, views, self.report)
                rgb += shown
                del seen
            with measure("pixels"):
                returns.append((yield from begun(pixels.return_gradients(v_color, v_alpha))))
        sinks: Sinks | None = None
        for one, back in zip(drawn, returns, strict=True):
            with measure("pixels"):
                v_color, v_alpha = yield from back
            with measure("backward"):
                sinks = sinks or self._transport.sinks(gathered.received.owners, gathered.received.slots)
                kernels.draw_back(one, v_color, v_alpha, sinks)
        return rgb

    def mse(self, plan: Plan, targets: Sequence[Tensor], sizes: Sizes | None = None) -> Tensor:
        """Return this rank's share [] of the last step's mean squared error. Arguments as `parts`'."""
        own = plan.owned[self._world.rank]
        images = [self._losses.photograph(target, patch.view)[0] for patch, target in zip(own, targets, strict=True)]
        return share_of_mse(self.rgb, images, own, self.views(sizes))

    def _splatted(self, plan: Plan) -> range:
        """Return the positions in the batch of the views that this rank splats its points for."""
        positions = self._strategy.placement.views_to_splat(plan, self._world)
        assert follow_each_other(positions), "as `unsupported_reason` found of any batch of so many views"
        return range(positions[0], positions[-1] + 1)

    def views(self, sizes: Sizes | None = None) -> list[View]:
        """Return the batch's views, of these sizes, whose cameras are the inputs."""
        sizes = sizes or ((self.settings.width, self.settings.height),) * self.settings.views
        cameras = zip(self._viewmats, self.Ks, sizes, strict=True)
        observed: list[Any] = [
            {name: all_views.of(i) for name, all_views in self._observed.items()} for i in range(self.settings.views)
        ]
        return [View(viewmat, K, *size, i, **observed[i]) for i, (viewmat, K, size) in enumerate(cameras)]

    def _cameras(self, positions: range, views: Sequence[View]) -> Cameras:
        some = slice(positions.start, positions.stop)
        sizes = [side for size in sizes_of(views[some]) for side in size]
        return Cameras(self._viewmats[some], self.Ks[some], sizes, self.times[some])

    def flush(self) -> None:
        """Apply the deferred steps, so that parameters are current. Every rank calls it."""
        self._kernels.flush(self._model)
        if self._model.lazy is not None:
            self.refresh()

    def refresh(self) -> None:
        """Recompute what depends on the points, after code other than this step changed them. Reads nothing back."""
        self._kernels.refresh(self._model)

    @property
    def taken(self) -> Tensor:
        """[] bool on the device: whether the last step was taken."""
        return self._status[5] == 0

    def status(self) -> Status:
        """Wait for the device, return the steps' progress, and reset the counters."""
        done, rows, _, intersections, _, full, sent, *segments = self._readback.tolist()
        self._readback.zero_()
        return Status(done, rows, tuple(segments), intersections, full > 0, sent)


def scalars_of_no_step(parameters: int, device: torch.device) -> Tensor:
    """Return [parameters, 8] scalars of an Adam step that changes nothing."""
    return torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], device=device).repeat(parameters, 1)
