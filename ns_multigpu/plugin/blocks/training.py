"""Training in blocks of fused steps: the host's work between two synchronizations with the device.

An ordinary step through autograd makes some hundred launches and as many objects; on a small capture the GPU mostly
waits for the host. Here a step is captured in CUDA graphs (see `graphs`) and replayed until one of its properties
changes: the number of points, the resolution, the harmonics, the plan. The host uploads a hundred numbers and the
images' indices.

A step's plan may depend on the measured work of each row of tiles when its view was last drawn. These counts are read
back after a fixed number of steps. So no rank waits for them, and all ranks plan alike.

Within a block, steps of points that are not drawn are deferred (`LazyAdam`); they are applied before other code may
access the model. With MCMC's noise none is deferred, because it moves all points after each step (`fused_noise`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import AdamStep
from cuda_ext.ops.optim.lazy_adam import LazyAdam, lazy_serves
from ns_multigpu.core.assign.assignment import Feedback
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.pair_capacities import all_gather_counts, pairs_of
from ns_multigpu.core.kernels import Kernels
from ns_multigpu.core.schema import names
from ns_multigpu.core.step.delayed_readback import DelayedReadback
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import Status, StepSettings, with_halos
from ns_multigpu.planning.rates import LAZY_BELOW
from ns_multigpu.plugin.blocks.device_steps import DeviceStep, DeviceSteps
from ns_multigpu.plugin.blocks.fused_noise import StepNoise
from ns_multigpu.plugin.blocks.fused_rescue import CompletedSteps, go_back, last_whole_step
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.host_cameras import HostCameras
from ns_multigpu.plugin.blocks.initial_capacity import InitialCapacity
from ns_multigpu.plugin.blocks.input_queue import InputQueue
from ns_multigpu.plugin.blocks.point_storage import PointStorage
from ns_multigpu.plugin.blocks.refinement import Refining
from ns_multigpu.plugin.blocks.signatures import Signatures
from ns_multigpu.plugin.blocks.step_buffers import StepBuffers
from ns_multigpu.plugin.blocks.step_capacities import LEAST_INTERSECTIONS, LEAST_ROWS, StepCapacities
from ns_multigpu.plugin.blocks.step_inputs import StepInputs, StepInputsMaker
from ns_multigpu.plugin.model import surfaces, view_parameters
from ns_multigpu.plugin.model.optimizers import BatchOptimizers
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.pipeline import DistributedPipeline

MOST_STEPS = 64
"""Maximum number of steps of a block: a signal, or the viewer, may have to wait for so many."""

_DEFERRED_MARGIN = 1.4
"""Factor on `LAZY_BELOW` while steps are deferred: views of one capture draw more and less of the model."""


@dataclass(frozen=True)
class BlockResult:
    """Results of a block of steps.

    Attributes:
        steps: their numbers.
        views: of each step, the batch's views by their index in the capture.
        reports: [steps, B + 1] see `Step.report`.
        mse: [] this rank's share of the last step's mean squared error; None without metrics.
    """

    steps: range
    views: list[list[int]]
    reports: Tensor
    mse: Tensor | None


class Training:
    """Fused steps of one rank.

    Args:
        pipeline: a `DistributedPipeline`, ready to train.
        optimizers: a `BatchOptimizers`, its checkpoint loaded.
        world: the ranks.
        computed: called once this rank has launched the part of a step that waits for no other rank.
        skips: whether steps whose gradients are not finite are skipped.
    """

    def __init__(
        self, pipeline: "DistributedPipeline", optimizers: BatchOptimizers, world: World,
        computed: Callable[[], None], *, skips: bool = False,
    ) -> None:  # fmt: skip
        self._all_gpus, self._device = DeviceSteps.of(world.device), world.device  # of results
        world = world if self._all_gpus is None else self._all_gpus.world
        self._pipeline, self._optimizers, self._world = pipeline, optimizers, world
        self._model: Any = pipeline.model
        self._skips = skips
        self._queue = InputQueue(pipeline, world, MOST_STEPS)
        self._camera, self._observed = HostCameras(pipeline.datamanager), pipeline.observed
        self._inputs_maker = StepInputsMaker(pipeline, optimizers, world.rank, self._camera)
        self._signature = Signatures(pipeline)
        self._step: Step | DeviceStep | None = None
        self._adam: AdamStep | None = None
        self._lazy: LazyAdam | None = None
        self._key: object = None
        self._names = names(self._model.schema)
        # All that is updated by the same Adam.
        self._stepped = [*self._names, *view_parameters.groups(self._model)]
        options = self._model.config
        cap = options.max_gaussians if options.densifier == "mcmc" else None
        self._points = PointStorage(names=self._names, cap=cap)
        self._noise = StepNoise(pipeline, optimizers)
        self._refining = Refining(pipeline, optimizers, self._noise)
        needles = options.use_scale_regularization
        self._needles = torch.zeros(1, device=self._device) if needles else None  # the next step's weight
        # Plans of cells depend on where cameras are.
        poses = view_parameters.POSES in view_parameters.groups(self._model)
        self._plans_by_poses = poses and not pipeline.strategy.pixels.whole
        self._wants_lazy = self._may_defer()
        self._rows_drawn: int | None = None  # maximum per rank and step
        self._buffers = StepBuffers(pipeline, world)
        self._buffers.captures &= self._all_gpus is None  # whose graphs are its own
        # On a CPU, and with collectives, the cost of sorting or sending grows with the capacity.
        spares = world.device.type == "cuda" and self._buffers.spared()["rows"]
        self._capacities = StepCapacities(
            len(pipeline.datamanager.train_share.shapes), one_for_all=self._buffers.one_for_all,
            least=(LEAST_ROWS, LEAST_INTERSECTIONS) if spares else (0, 0),
        )  # fmt: skip
        self._first = InitialCapacity(pipeline, world, self._buffers)
        self._block = range(0)  # the current one
        pool = GraphPool(world.device) if self._buffers.captures else None
        self._graphs = StepGraphs(pipeline.timer, computed, pool)
        self._readback = DelayedReadback(pipeline.strategy.assignment.learn)

    @property
    def _is_exchanged(self) -> bool:
        return self._pipeline.strategy.rows.is_exchanged and self._world.size > 1

    def block(self, first: int, limit: int) -> range:
        """Return the steps from `first` on, before `limit`, between which no property of the step changes."""
        batch, densifier = self._pipeline.batch_size, self._model.densifier
        self._signature.forget()
        signature, fits, beyond = self._signature(first), first, min(limit, first + MOST_STEPS)
        # Every property changes at most once in so few steps, so bisection finds the last step before a change.
        while beyond - fits > 1:
            last = (fits + beyond) // 2
            changes = densifier.due_after(first * batch, (last - first) * batch) or self._signature(last) != signature
            fits, beyond = (fits, last) if changes else (last, beyond)
        self._signature.same(range(first, fits + 1))
        return range(first, fits + 1)

    def run(self, steps: range, *, metrics: bool = True, while_busy: Callable[[], None] | None = None) -> BlockResult:
        """Run the steps of a block. Every rank calls it with the same arguments.

        Refining, and resetting opacities, is left to the caller: see `refine`.

        Args:
            metrics: whether to compute the last step's mean squared error.
            while_busy: called once, when all steps have been launched.
        """
        self._block = steps
        self._choose_lazy()
        strategy, images = self._pipeline.strategy, steps[0] * self._pipeline.batch_size
        strategy.observe(self._model.primitive(depth=False), self._model.points, images)
        if self._plans_by_poses:
            optimizer = self._model.camera_optimizer
            self._camera.correct(optimizer.pose_adjustment, optimizer.config.mode)
        if strategy.assignment.prefetches:
            self._inputs_maker.prefetch_plans(steps, MOST_STEPS, lambda step: self._signature(step)[1])
        self.load_images(steps[0])
        feeds: list[StepInputs] = []
        step: Step | DeviceStep | None = None
        with last_whole_step(self, steps, self._optimizers, self._world) as taken:
            while taken.done < len(steps):
                step = None  # free its memory for the next one, if there is to be one
                step = self._prepared(steps[0])
                step.refresh()  # other code may have changed the points since the last block
                self._queue.begin(step, taken.done)
                k = taken.done
                while k < len(steps):
                    together = min(self._inputs_maker.together(k), len(steps) - k)
                    if k == len(feeds):  # drawn while the device runs earlier steps
                        for place in range(k, k + together):
                            feeds.append(self._make_inputs(steps[place]))
                            self._queue.put(place, feeds[place])
                    num_taken = self._take(step, feeds[k : k + together])
                    self._noise.after(step, steps[k], feeds[k].rate)
                    k += num_taken
                if self._lazy is None:  # otherwise deferred steps come first
                    self._refining.ahead(steps[-1], step.taken)
                if while_busy is not None:
                    while_busy()
                    while_busy = None
                with self._pipeline.timer.measure("waiting for the device"):
                    status = step.status()
                taken.done += status.done
                self._graphs.count_exchanges()
                if status.full and self._is_skipped(taken.done):
                    status = replace(status, full=False)
                    self._skip(taken, feeds)
                self._learn(status)
            assert step is not None
            step.flush()  # only here: it rounds, so its place must not depend on capacities
        if self._signature.enlarges(steps[0]):  # few views were seen at this size; the next ones may need more
            self._capacities.spare(12, 12, **self._buffers.spared())
        self._readback.learn(pending=0)  # feedback in a checkpoint must not depend on pending readbacks
        mse = self._mse(step).to(self._device) if metrics else None
        reports = self._queue.reports(len(steps)).to(self._device)
        return BlockResult(steps, [step_inputs.indices for step_inputs in feeds], reports, mse)

    def _is_skipped(self, place: int) -> bool:
        """Return whether step number `place` of the block is skipped, the same on every rank."""
        return self._skips and not bool(self._queue.reports(place + 1)[place, -1].isfinite())

    def _skip(self, taken: CompletedSteps, feeds: list[StepInputs]) -> None:
        """Count the first step that was not taken as skipped, and drop the inputs of those after it, which hold Adam's
        numbers."""
        assert self._adam is not None
        taken.done, taken.skipped = taken.done + 1, taken.skipped + 1
        del feeds[taken.done :]
        taken.recount(self._adam, self._optimizers)
        self._refining.forget()

    def _choose_lazy(self) -> None:
        """Choose whether to defer steps in the coming block: not if a step draws much of the model.

        A point that is drawn then costs 2.5 times as much as one with an ordinary step (benchmarks/NOTES.md). The
        choice changes only between blocks, because within one there are deferred steps, and not where both cost about
        the same: each change captures new graphs. On a CPU steps are always deferred, so that results are bitwise
        reproducible.
        """
        if not self._may_defer() or self._world.device.type != "cuda" or self._rows_drawn is None:
            return
        # Of a sharded model every rank draws about its shard; of replicas every rank updates the points that any rank
        # drew.
        below = LAZY_BELOW * (_DEFERRED_MARGIN if self._wants_lazy else 1.0)
        wanted = self._world.size * self._rows_drawn < below * max(self._model.total_points, 1)
        if wanted != self._wants_lazy:
            self._wants_lazy, self._key = wanted, None

    def _may_defer(self) -> bool:
        """Return whether steps may be deferred: not if undrawn points move otherwise, or the kernels lack support."""
        defers = self._model.primitive(depth=False).kernels().can_defer
        return defers and not self._noise.active and self._needles is None and self._all_gpus is None

    def refine(self, steps: range) -> None:
        """Run the densification that is due after a block."""
        if not self._refining.due(steps[-1]):
            return
        if not self._refining.replaces(steps[-1]):
            self._refining.take(steps[-1])
            return
        if not self._points.keeps(self._model.most_points):
            self._release()
        adam, self._adam = self._adam, None  # the step remains valid if the points keep their storage
        self._refining.take(steps[-1])
        if adam is not None and self._remains_valid(adam):
            self._adam = adam

    def _remains_valid(self, adam: AdamStep) -> bool:
        """Return whether the step and its Adam remain valid after a refinement: all points kept their addresses."""
        model = self._model
        return not self._first.due(self._capacities.now) and self._points.follows(
            model.gauss_params, adam, model.densifier_state, model.most_points
        )

    def taken_since(self) -> int:
        """Return the number of steps completed by the device since the last query."""
        return self._step.status().done if self._step is not None else 0

    def go_back(self, taken: CompletedSteps) -> None:
        """Restore the state after the completed steps of a block, and release all buffers."""
        go_back(self._points, self._stepped, self._optimizers, self._lazy, taken)
        self._release()

    def _release_step(self) -> None:
        """Release the step and its graphs, which hold buffers; keep the points' storage."""
        self._graphs.forget()
        self._step = self._key = None

    def _release(self) -> None:
        self._graphs.forget()
        self._buffers.forget()
        self._points.forget()
        self._step = self._adam = self._key = None

    # ---- the step ----

    def _take(self, step: Step | DeviceStep, feeds: Sequence[StepInputs]) -> int:
        """Run the next step, or all of these if the host has nothing to do between them; return how many were run."""
        step_inputs = feeds[0]
        plan, factor = with_halos(step_inputs.plan, step_inputs.views), self._signature(step_inputs.step)[1]
        several = self._graphs.at_once(plan, len(feeds))
        steps = several if several > 1 and self._follow(feeds) else 1
        with self._pipeline.timer.step(steps):
            with self._pipeline.timer.measure("data"):
                self._queue.ready(self._buffers, step_inputs, plan, factor)
                if isinstance(step, DeviceStep):
                    step.batch = step_inputs.views
                for observed in self._observed:
                    observed.fill(step_inputs.indices)
                if self._needles is not None:
                    batch, points = self._pipeline.batch_size, max(self._model.total_points, 1)
                    self._needles.fill_(self._model.needle_weight(step_inputs.step * batch, batch) / points)
            step.rgb = self._graphs.take(plan, lambda: self._queue.parts(self._buffers, step, step_inputs), steps)
            written = self._pipeline.strategy.pixels.written_bytes(plan, step_inputs.views, self._world)
            self._world.traffic.add(steps * written)
            if self._pipeline.strategy.assignment.learns is not Feedback.NOTHING:
                self._readback.send(step_inputs.views, step.measured_work, step.taken)
        return steps

    def _follow(self, feeds: Sequence[StepInputs]) -> bool:
        """Return whether steps need no host work between them: their inputs are in place or selected on the device."""
        between = self._noise.active or self._observed or self._needles is not None
        return not between and self._queue.shows(self._buffers) and self._inputs_maker.alike(feeds)

    def _measure(self, part: str) -> AbstractContextManager[Any]:
        """Return the context that times a part of a step."""
        return self._graphs.measure("exchange" if self._buffers.exchanges_in(part) else "compute")

    def _initial_capacity(self, step: int, kernels: Kernels) -> None:
        """Set the capacities from this step on, by the demand of the coming block's batches."""
        factor = self._signature(step)[1]
        coming = self._pipeline.datamanager.coming(self._block, self._pipeline.batch_size)
        batches = [[self._camera(index, factor)[0] for index in indices] for indices in coming]
        points = self._points
        self._capacities.begin(
            self._first.capacities(
                self._capacities.now, prod(self._camera.largest(factor)), batches,
                lambda: kernels.model(points.params, points.moments, {}, None), kernels,
            )
        )  # fmt: skip

    def _made(
        self, size: tuple[int, int], kernels: Kernels, counts: bool, losses: Sequence[tuple[str, float]],
        kind: torch.dtype,
    ) -> Step | DeviceStep:  # fmt: skip
        """Return the step for the present capacities."""
        assert self._capacities.now is not None and self._adam is not None
        options, strategy = self._model.config, self._pipeline.strategy
        rows, pairs, intersections = self._capacities.now
        moments = dict(zip(self._stepped, zip(self._adam.exp_avgs, self._adam.exp_avg_sqs, strict=True), strict=True))
        world, views = None if strategy.gradients.summed else self._world, self._pipeline.batch_size
        of_views = view_parameters.in_steps(self._model, moments, views, world)
        photographs = of_views["exposures"] or of_views["grids"]
        settings = StepSettings(
            *size, views=views, ssim_lambda=options.ssim_lambda,
            rows=rows, segment=pairs, intersections=intersections,
            view_numbers=0 if photographs is None else photographs.now[0].numel(), poses=of_views["poses"] is not None,
            alpha=self._queue.images.alpha, masks=self._queue.images.masks, sky_weight=options.sky_loss,
            skips=self._skips, **{name: dict(losses).get(of, 0.0) for of, name in surfaces.of_depth(options).items()},
            intrinsics_rows=len(self._camera(0, 1)[0].K),
        )  # fmt: skip
        # If every rank sees every row, rank 0 counts for all, so that the sum over ranks remains correct.
        counted = counts and (self._world.is_main or not strategy.gradients.summed)
        tensors = kernels, self._points.params, self._points.moments, self._points.statistics if counted else {}
        if self._all_gpus is not None:
            place_views = partial(view_parameters.in_steps, self._model, moments, views)
            return DeviceStep(self._all_gpus, *tensors, settings, kind, place_views)
        transport = self._buffers.transport(settings, kernels)
        self._buffers.make_pictures(settings, kind)
        return Step(
            *tensors, settings, strategy, transport, self._lazy, self._buffers.lists(settings, kernels, transport),
            self._measure,
            # Noise moves all points after each step: rebuilding group boxes would cost as much as culling saves.
            group_culling=False if self._noise.active else None,
            observed={observed.name: observed.batch for observed in self._observed},
            **of_views,
        )  # fmt: skip

    def _kernels(self, degree: int | None, counts: bool, losses: Sequence[tuple[str, float]]) -> Kernels:
        options, primitive = self._model.config, self._model.primitive(depth=False)
        now = {"sh_degree": degree, "absgrad": options.use_absgrad and counts}
        primitive = replace(primitive, **{name: value for name, value in now.items() if hasattr(primitive, name)})
        of_depth = surfaces.of_depth(options)
        of_channels = {name: weight for name, weight in losses if name not in of_depth}
        more: dict[str, Any] = {"losses": of_channels} if of_channels else {}
        if len(of_channels) < len(losses):
            more["depth"] = True
        if self._needles is not None:
            more |= {"needles": self._needles, "max_ratio": options.max_gauss_ratio}
        kernels = primitive.kernels(**self._noise.weights(), **more)
        assert kernels is not None, "asked before: see `fused_options.obstacle`"
        sized = counts and "radii" in self._points.statistics
        return replace(kernels, sized=sized) if isinstance(kernels, GaussianKernels) else kernels

    def _mse(self, step: Step | DeviceStep) -> Tensor:
        """Return this rank's share of the last step's mean squared error, []."""
        return step.mse(self._queue.plan, self._queue.targets, self._queue.sizes)

    # ---- the host's part of a step ----

    def _make_inputs(self, step: int) -> StepInputs:
        """Return the inputs of a step, and advance optimizers and schedules."""
        self._prepared(step)
        assert self._adam is not None
        self._readback.learn()
        return self._inputs_maker.draw(step, self._signature(step)[1], self._adam, self._noise.rate)

    def load_images(self, step: int) -> None:
        """Load the images of steps from this one on, if they are kept on the GPU. Every rank calls it."""
        self._queue.load(step, self._signature(step)[1])

    def _prepared(self, step: int) -> Step | DeviceStep:
        """Return the fused step for `step`, rebuilt if one of its properties has changed."""
        signature = self._signature(step)
        key = (signature, self._capacities.now)
        if self._step is not None and self._adam is not None and self._key == key:
            return self._step
        degree, factor, counts, losses = signature
        model, pipeline = self._model, self._pipeline
        if counts:
            model.densifier.statistics(model.gauss_params, model.densifier_state)
        groups = [self._optimizers.optimizers[name] for name in self._names]
        self._adam = AdamStep([self._optimizers.optimizers[name] for name in self._stepped])
        if not self._points.has_capacity(model.most_points):
            self._release_step()  # free the old storage for the larger one
        is_kept = self._points.hold(model.gauss_params, self._adam, model.densifier_state, model.most_points)
        if is_kept and self._step is not None and self._key == key and not self._first.due(self._capacities.now):
            return self._step  # a refinement has changed nothing that its graph depends on
        self._capacities.spare(
            13, 18, **self._buffers.spared()
        )  # points grow in number; the step is rebuilt here anyway
        serves = all(lazy_serves(group["betas"], group["eps"]) for o in groups for group in o.param_groups)
        if not self._wants_lazy or not serves:
            self._lazy = None
        elif self._lazy is None or len(self._lazy.last) != self._points.rows:  # otherwise it may hold deferred steps
            self._lazy = LazyAdam.make(self._points.rows, self._world.device)
        self._graphs.forget()
        self._buffers.forget()
        self._step = None
        size = self._camera.largest(factor)
        kernels = self._kernels(degree, counts, losses)
        if self._first.due(self._capacities.now):
            self._initial_capacity(step, kernels)
        self._first.check(self._capacities.now, prod(size))
        as_bytes = factor == 1 and pipeline.config.datamanager.cache_images_type == "uint8"
        kind = torch.uint8 if as_bytes else torch.float32
        self._step = self._made(size, kernels, counts, losses, kind)
        self._key = (signature, self._capacities.now)
        return self._step

    def _learn(self, status: Status) -> None:
        """Update capacities from measured demand, which is all-gathered where rows are exchanged."""
        self._buffers.count_traffic(status)
        self._rows_drawn = status.rows
        pairs = all_gather_counts(status.segments, self._world) if self._is_exchanged else pairs_of(0, self._world.size)
        needed = (status.rows, pairs, status.intersections)
        self._capacities.learn(needed, status.full, status.done * self._pipeline.batch_size)
        if not status.full:  # rebuilding a step before it exceeds a capacity costs less than half a retried block
            self._capacities.spare(7, 12, **self._buffers.spared())
