"""Training a sharded model in blocks of fused steps: see `fused_training`, of which this is the part that differs.

A step's plan follows from how much work each row of tiles was when its view was seen last. Those counts come from the
device some steps later than they are made, always the same number, so that nobody waits for them and all ranks plan the
same.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from cuda_ext.ops.row_exchange import RECORD_FLOATS
from ns_multigpu.core.peer_memory import choose_transport
from ns_multigpu.core.placement import Plan
from ns_multigpu.core.types import View
from ns_multigpu.core.world import World
from ns_multigpu.plugin.blocks.fused_training import BlockResult, FusedTraining
from ns_multigpu.plugin.blocks.plan_graphs import PlanGraphs
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.fused_step import padded
from ns_multigpu.primitives.gaussians import TILE
from ns_multigpu.primitives.late_counts import LateCounts
from ns_multigpu.primitives.tile_lists import GatheredLists, SortedLists, TileLists
from ns_multigpu.primitives.tile_rows import CollectiveRows, OwnRows, PeerRows, RowTransport
from ns_multigpu.primitives.tile_settings import TileSettings, bands
from ns_multigpu.primitives.tile_step import TileStep

_MOST_AT_FIRST = 1 << 20
"""Rows of a rank that the first step of a run has room for; a step that needs more is taken again with more."""


class TileTraining(FusedTraining):
    """The fused steps of one rank of a sharded model. Arguments as `FusedTraining`'s."""

    def __init__(self, pipeline: Any, optimizers: Any, world: World, computed: Callable[[], None]) -> None:
        super().__init__(pipeline, optimizers, world, computed)
        self._computed = computed
        self._counts = LateCounts(pipeline.strategy.assignment.work)
        self._rows: RowTransport | None = None
        self._lists: TileLists | None = None
        self._lists_shape: tuple[int, ...] = ()
        self._targets: list[Tensor] = []
        self._drawn: Plan = []
        options = pipeline.config
        try:
            self._transport = choose_transport(world, options.transport)
        except RuntimeError as error:
            raise InputError(f"--pipeline.transport {options.transport}: {error}") from error
        self._atomics = options.gradients == "atomics"
        # Collectives, and a sort over all GPUs, are launched as they come.
        alone = world.device.type == "cuda" and self._transport.peer and options.tile_lists == "gather"
        self._plans = PlanGraphs(world.device) if alone else None
        self._pictures = torch.zeros(0)
        if options.overlap < 1:
            raise InputError(f"--pipeline.overlap {options.overlap}: splats leave in 1 part at least.")
        if world.is_main and world.size > 1:
            CONSOLE.print(self._transport.reason)

    def run(self, steps: range) -> BlockResult:
        result = super().run(steps)
        self._counts.learn(leave=0)  # what is known at a checkpoint must not depend on what was on its way
        return result

    def refine(self, steps: range) -> None:
        super().refine(steps)
        if self._key is None:
            self._model.count_shards()

    def _own_views(self) -> slice:
        return slice(0, self._pipeline.batch_size)

    def _plan(self, views: list[View]) -> Plan:
        self._counts.learn()
        return self._pipeline.strategy.assignment.assign_alike(views, self._world.size)

    def _render(self, step: TileStep, feed: Any) -> None:
        timer, plan = self._pipeline.timer, bands(feed.plan, step.settings)
        mine = plan[self._world.rank]
        with timer.measure("data"):
            images = self._images.get(feed.indices, plan)
            as_bytes = self._signature(feed.step)[1] == 1
            self._targets = []
            for patch, image in zip(mine, images, strict=True):
                _, top, _, bottom = patch.rendered(feed.views[patch.view])
                target = (image if as_bytes else self._small(image, feed.step))[top:bottom].contiguous()
                if self._plans is not None:  # a graph reads it where it was when it was captured
                    target = self._pictures[patch.view, top:bottom].copy_(target)
                self._targets.append(target)
        if self._plans is None:
            step.render(plan, self._targets)
            self._computed()
            step.update()
        else:
            with timer.measure("compute"):
                step.rgb = self._plans.take(tuple(map(tuple, plan)), partial(self._whole, step, plan))
            self._computed()
        self._drawn = plan
        self._counts.send(feed.views, step.tile_counts)

    def _whole(self, step: TileStep, plan: Plan) -> list[Tensor]:
        step.render(plan, self._targets)
        step.update()
        return step.rgb

    def _measure(self, part: str) -> AbstractContextManager[Any]:
        """What a step's part is measured by, where it is launched by itself."""
        if self._plans is not None:
            return nullcontext()
        return self._pipeline.timer.measure({"send": "exchange", "return": "exchange"}.get(part, "compute"))

    def _release(self) -> None:
        super()._release()
        if self._plans is not None:
            self._plans.forget()

    def _first_capacities(self, pixels: int) -> tuple[int, ...]:
        batch = self._pipeline.batch_size
        rows = padded(min(max(self._model.shard_counts) * batch, _MOST_AT_FIRST))
        tiles = -(-pixels // (TILE * TILE)) * batch
        return rows, rows, padded(4 * rows + 16 * tiles)

    def _made(self, view: View, degree: int, moments: Any, counts: bool, kind: torch.dtype) -> TileStep:
        assert self._room.now is not None
        model, options = self._model, self._model.config
        rows, segment, intersections = self._room.now
        settings = TileSettings(
            width=view.width, height=view.height, views=self._pipeline.batch_size, degree=degree,
            antialiased=options.rasterize_mode == "antialiased", absgrad=options.use_absgrad and counts,
            ssim_lambda=options.ssim_lambda, rows=rows, segment=segment, intersections=intersections,
            selective=options.selective_adam, groups=self._pipeline.config.overlap, **self._noise.weights(),
        )  # fmt: skip
        statistics = model.densifier.statistics(model.gauss_params, model.densifier_state) if counts else {}
        self._rows = self._transport_for(settings)
        if self._plans is not None:
            self._plans.forget()
            shape = (settings.views, view.height, view.width, 3)
            self._pictures = torch.empty(shape, dtype=kind, device=self._world.device)
        return TileStep(
            dict(model.gauss_params), moments, statistics, settings, self._world, self._rows, self._lazy,
            lists=self._lists_for(settings), measure=self._measure,
        )  # fmt: skip

    def _lists_for(self, settings: TileSettings) -> TileLists:
        shape = (settings.width, settings.height, settings.rows, settings.segment, settings.intersections)
        if self._lists is None or self._lists_shape != shape:
            self._lists = None  # its memory is the next one's
            self._lists_shape = shape
            if self._pipeline.config.tile_lists == "sort":
                self._lists = SortedLists(settings, self._world, peer=self._transport.peer)
            else:
                self._lists = GatheredLists(settings, self._world.rank)
        return self._lists

    def _transport_for(self, settings: TileSettings) -> RowTransport:
        shape = (settings.rows, settings.segment, settings.words)
        old = self._rows
        if old is not None and (old.rows, old.capacity, old.words) == shape:
            return old
        self._rows = None  # its memory is the next one's
        if self._world.size == 1:
            return OwnRows(self._world, *shape)
        if self._transport.peer:
            return PeerRows(self._world, *shape, atomics=self._atomics)
        return CollectiveRows(self._world, *shape)

    def _learn(self, status: Any) -> None:
        super()._learn(status)
        if self._transport.peer:  # collectives count for themselves
            self._world.traffic.add(2 * 4 * RECORD_FLOATS * status.sent)

    def _mse(self, step: TileStep) -> Tensor:
        s = step.settings
        squared = torch.zeros((), device=self._world.device)
        for patch, rgb, target in zip(self._drawn[self._world.rank], step.rgb, self._targets, strict=True):
            top = patch.y0 - patch.rendered(View(step.viewmats[0], step.Ks[0], s.width, s.height))[1]
            own = target[top : top + patch.y1 - patch.y0]
            wanted = own.float() / 255 if own.dtype == torch.uint8 else own
            squared = squared + (rgb - wanted).square().sum()
        return squared / (3 * s.width * s.height * s.views)
