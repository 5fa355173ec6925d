"""Steps of `tile` over the views of a city, with what training does around them (`plugin.blocks.training`)."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.lockstep import Clock, over_ranks
from benchmarks.scaling.city_runs import CityViews, Run, bands_in
from benchmarks.scenes.city_model import CityModel
from cuda_ext.ops.exchange.row_exchange import RECORD_FLOATS
from ns_multigpu.core.assign.assignment import TileRanges
from ns_multigpu.core.assign.tile_work import TileWork
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transports import Transport, make_transport
from ns_multigpu.core.step.delayed_readback import DelayedReadback
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import with_halos
from ns_multigpu.core.step.tile_lists import SortedLists
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer
from strategies.tile import tile

PARTS = ("project", "send", "sort", "raster", "pixels", "loss", "backward", "message", "return", "update")
LINK_GB_PER_S = 390.0
"""Writing to another H200's memory over NVLink."""
RECORD_BYTES = 4 * RECORD_FLOATS


@dataclass(frozen=True)
class Mode:
    """Variant of the steps of `tile`.

    Attributes:
        transport: "peer" or "collective".
        lists: "gather": each rank sorts received rows; "sort": the sort over all ranks.
        lazy: defer the steps of points that are not drawn.
    """

    transport: str = "peer"
    lists: str = "gather"
    lazy: bool = True

    @property
    def name(self) -> str:
        words = [self.transport, "sort" * (self.lists == "sort")]
        words += ["" if self.lazy else "dense"]
        return ", ".join(word for word in words if word)


class TileRun(Run):
    """See `Run`."""

    def __init__(
        self, model: CityModel, city_views: CityViews, world: World, batch: int, mode: Mode, **options: Any
    ) -> None:
        super().__init__(model, city_views, world, batch, mode.lazy, **options)
        self.mode = mode
        self._strategy = tile(world)
        self._strategy.rows.slots = mode.lists == "sort"
        assert isinstance(self._strategy.assignment, TileRanges)
        self._assignment = self._strategy.assignment
        self._counts = DelayedReadback(self._assignment.learn)
        self._parts = Parts(world.device)
        captures = world.device.type == "cuda" and mode.transport == "peer" and mode.lists == "gather"
        # The timer is the host's: events of the device would count, too.
        timer = StepTimer(torch.device("cpu"))
        self._graphs = StepGraphs(timer, lambda: None, GraphPool(world.device)) if captures else None
        shape = (batch, city_views.scene.height, city_views.scene.width, 3)
        self._pictures = torch.zeros(shape, dtype=torch.uint8, device=world.device)

    def _make(self) -> Step:
        self._transport: Transport | None = None  # its memory is the next one's
        settings = self.settings()
        legs, peer = (self._strategy.rows, self._strategy.gradients), self.mode.transport == "peer"
        shape = (settings.rows, settings.segment, settings.words(self._strategy.assignment))
        self._transport = make_transport(*legs, self.world, self.kernels, *shape, peer=peer)
        sorts = self._strategy.rows.slots
        lists = SortedLists(settings, self.world, self._transport.lines, peer=peer) if sorts else None
        if self._graphs is not None:
            self._graphs.forget()
        return self.made(settings, self._strategy, self._transport, lists, measure=self._parts.measure)

    def _take(self, batch: int, inputs: Tensor) -> None:
        views = self.batches[batch]
        self._counts.learn()
        plan = with_halos(self._strategy.plan_alike(views), views)
        targets = bands_in(self._pictures, plan.drawn[self.world.rank], views, self.city_views.images)
        self._inputs.upload(inputs)
        if self._graphs is None or self._parts.on:
            self.step.take(plan, targets)
        else:
            self._graphs.take(plan, partial(self.step.parts, plan, targets))
        self._counts.send(views, self.step.measured_work, self.step.taken)

    def flush(self) -> None:
        super().flush()
        self._counts.learn(pending=0)

    def warm_up(self) -> None:
        super().warm_up()
        # A step with exceeded capacities has counted too little.
        for b in range(len(self.batches)):
            self._fit(b)
        self.flush()

    def time(self, steps: int) -> dict[str, Any]:
        """Also balance: of the ranks' intersections, see `balance`; exchange: by rank, rows sent and bytes a step."""
        self.world.traffic.since("steps")
        before = self.number
        result = super().time(steps)
        sent = self.last_status.sent / self.last_status.done
        counted = self.world.traffic.since("steps") / (self.number - before)
        table = over_ranks([sent, counted], self.world)
        peer = self.mode.transport == "peer"
        rows = [row[0] for row in table]
        sizes = [2 * RECORD_BYTES * row[0] if peer else row[1] for row in table]
        return {**result, "balance": self.balance(), "exchange": {"rows_sent": rows, "bytes_sent": sizes}}

    def balance(self) -> dict[str, float]:
        """Return the maximum over the mean of the ranks' intersections, with equal bands and with those that are drawn.

        Also returns all ranks' intersections, halos included, over those of whole views. Means over batches.
        """
        counts = self._assignment.work.counts
        found: dict[str, list[float]] = {"equal_rows": [], "planned": [], "with_halo": []}
        for views in self.batches:
            by_view = [counts[view.index] for view in views]
            for name, work in (("equal_rows", TileWork()), ("planned", self._assignment.work)):
                cut = TileRanges(work).assign(views, self.world.size)
                plan = with_halos(cut, views)
                own, drawn = [0] * self.world.size, 0
                for rank, patches in enumerate(plan.drawn):
                    for patch in patches:
                        tile, of = work.tile, by_view[patch.view]
                        _, top, _, bottom = patch.rendered(views[patch.view])
                        own[rank] += sum(of[patch.y0 // tile : -(-patch.y1 // tile)])
                        drawn += sum(of[top // tile : -(-bottom // tile)])
                total = max(1, sum(own))
                found[name].append(max(own) * self.world.size / total)
                if name == "planned":
                    found["with_halo"].append(drawn / total)
        return {name: round(statistics.mean(values), 3) for name, values in found.items()}

    def parts(self) -> dict[str, Any]:
        """Return milliseconds by part, as medians over the batches' steps: the slowest rank's and the ranks' mean.

        A part of the exchange ends at its barrier, so it includes waiting for the other ranks.

        `link_gb_per_s`: bytes sent in "send" and "return" over their time, the busiest rank's: a lower bound.
        """
        for b in range(len(self.batches)):
            self.advance(b)
        self.step.status()
        self._parts.start()
        for b in range(len(self.batches)):
            self.advance(b)
        mine = self._parts.stop()
        self.flush()
        sent = self.step.status().sent / len(self.batches)
        table = over_ranks([*(mine[part] for part in PARTS), sent], self.world)
        columns = list(zip(*table, strict=True))
        exchange = [row[PARTS.index("send")] + row[PARTS.index("return")] for row in table]
        rates = [2 * RECORD_BYTES * row[-1] / (ms * 1e6) for row, ms in zip(table, exchange, strict=True) if ms > 0]
        return {
            "slowest_ms": dict(zip(PARTS, map(max, columns[:-1]), strict=True)),
            "mean_ms": dict(zip(PARTS, map(statistics.mean, columns[:-1]), strict=True)),
            "link_gb_per_s": max(rates, default=0.0),
        }


class Parts:
    """The time of the parts of steps; off until started.

    Attributes:
        on: whether it measures.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.on = device, False
        self._clocks: dict[str, list[Clock]] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Measure a part; an argument of `Step`."""
        if not self.on:
            yield
            return
        clock = Clock(self._device)
        clock.mark()
        yield
        clock.mark()
        self._clocks.setdefault(part, []).append(clock)

    def start(self) -> None:
        self.on = True
        self._clocks = {}

    def stop(self) -> dict[str, float]:
        """Return the median of each part of `PARTS` in milliseconds."""
        self.on = False
        unknown = set(self._clocks) - set(PARTS)
        if unknown:
            raise RuntimeError(f"Step names parts that this benchmark does not know: {sorted(unknown)}")
        return {
            part: statistics.median(clock.intervals()[0] for clock in self._clocks[part])
            if part in self._clocks
            else 0.0
            for part in PARTS
        }
