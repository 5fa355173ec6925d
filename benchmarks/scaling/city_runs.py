"""Training steps over the views of a city by several variants: their common parts, and `single`.

A run measures the capacities of its steps, checks the model after a first step, and times steps as in training: views
in turn, inputs uploaded, deferred steps flushed. Learning rates are so small that the model is unchanged. So all runs
start from the same model.
"""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.lockstep import Clock, Inputs, memory, over_ranks
from benchmarks.lib.stopwatch import Work, captured
from benchmarks.scenes.city_model import DEGREE, CityModel, CityScene
from cuda_ext import LazyAdam
from cuda_ext.ops.optim.adam import adam_scalars
from cuda_ext.ops.optim.lazy_adam import MOST_STEPS
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.pair_capacities import all_gather_counts, most_of
from ns_multigpu.core.exchange.transports import OwnRows, Transport
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import Status, StepSettings, padded
from ns_multigpu.core.step.tile_lists import TileLists
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import TILE, Patch, View
from ns_multigpu.primitives.gaussians.functions import Gaussians
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels
from ns_multigpu.primitives.gaussians.schema import ORDER
from strategies.single import single

SSIM_LAMBDA = 0.2
RATES = {
    "means": 1.6e-4, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "features_dc": 2.5e-3, "features_rest": 1.25e-4
}  # fmt: skip
"""Splatfacto's."""
_STILL = dict.fromkeys(ORDER, 1e-12)
"""Rates that leave the model as it is."""
_BLOCK = 50
"""Steps that share a flush, as in training."""
_BURST = 4
"""Steps that the host may be ahead without waiting for the device."""
_MOST_AT_FIRST = 1 << 20
_MOST_TRIES = 16


@dataclass(frozen=True)
class CityViews:
    """Input of a run.

    Attributes:
        scene, views: see there. images: [H, W, 3] uint8 each, on the device.
    """

    scene: CityScene
    views: Sequence[View]
    images: Sequence[Tensor]


def bands_in(
    pictures: Tensor, patches: Sequence[Patch], views: Sequence[View], images: Sequence[Tensor]
) -> list[Tensor]:
    """Copy the bands that patches render of the views' images to places that graphs know, and return those places.

    Args:
        pictures: [B, H, W, 3], the places. patches: of the batch's views. images: [H, W, 3] each, of all views.
    """
    bands: list[Tensor] = []
    for patch in patches:
        _, top, _, bottom = patch.rendered(views[patch.view])
        bands.append(pictures[patch.view, top:bottom].copy_(images[views[patch.view].index][top:bottom]))
    return bands


class Run(ABC):
    """Runner of steps of one variant.

    Args:
        model: this rank's points; its moments are used.
        city_views: the views.
        world: the ranks that take the steps together.
        batch: views of a step.
        lazy: defer the steps of points that are not drawn.
        counting: add to densification's statistics, as training's steps do for a while.
        absgrad: sum up absolute gradients, as those do then.

    Attributes:
        capacities: of rows, a segment and intersections. needed: what steps have needed of them.
        statistics: by name, [N] each; none unless steps are counting.
    """

    def __init__(
        self, model: CityModel, city_views: CityViews, world: World, batch: int, lazy: bool, *, counting: bool = False,
        absgrad: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.city_views, self.world, self.batch = model, city_views, world, batch
        names = ("grad2d", "count", "radii") if counting else ()
        self.statistics = {name: torch.zeros(len(model), device=model.device) for name in names}
        kernels = Gaussians(sh_degree=DEGREE, absgrad=absgrad).kernels()
        assert kernels is not None
        self.kernels: GaussianKernels = kernels
        views = len(city_views.views)
        self.batches = [
            [city_views.views[(b * batch + k) % views] for k in range(batch)] for b in range(max(1, views // batch))
        ]
        self._lazy = LazyAdam.make(len(model), model.device) if lazy else None
        self.number = 0
        """Of the last step, as Adam counts."""
        pixels = city_views.scene.width * city_views.scene.height
        rows = padded(min(max(model.counts) * batch, _MOST_AT_FIRST))
        self.capacities: tuple[int, ...] = (rows, rows, padded(4 * rows + 16 * batch * -(-pixels // TILE**2)))
        self.needed: tuple[int, ...] = (0, 0, 0)
        self.step: Any = None

    # ---- what ways differ in ----

    @abstractmethod
    def _make(self) -> Step:
        """Return a step for `capacities`; `self.step` is None now."""

    @abstractmethod
    def _take(self, batch: int, inputs: Tensor) -> None:
        """Launch a step of one of `batches`."""

    # ---- what they share ----

    def settings(self) -> StepSettings:
        """Return a step's settings, with the present capacities."""
        scene, (rows, segment, intersections) = self.city_views.scene, self.capacities
        return StepSettings(
            width=scene.width, height=scene.height, views=self.batch, ssim_lambda=SSIM_LAMBDA, rows=rows,
            segment=segment, intersections=intersections, intrinsics_rows=len(self.batches[0][0].K),
        )  # fmt: skip

    def made(
        self, settings: StepSettings, strategy: Strategy, transport: Transport, lists: TileLists | None = None,
        **options: Any,
    ) -> Step:  # fmt: skip
        """Return a step with its input transfer."""
        step = Step(
            self.kernels, self.model.params, self.model.moments(), self.statistics, settings, strategy, transport,
            self._lazy, lists, **options,
        )  # fmt: skip
        self._inputs = Inputs(step.inputs)
        return step

    def warm_up(self) -> None:
        """Run every batch twice, grow capacities as needed, and keep as much memory as training would."""
        for _ in range(2):
            for b in range(len(self.batches)):
                self._fit(b)
            self.flush()
        self.capacities = tuple(padded(n) for n in self.needed)
        self.step = None
        self.step = self._make()

    def _fit(self, b: int) -> None:
        for _ in range(_MOST_TRIES):
            if self.step is None:
                self.step = self._make()
            self.advance(b)
            status = self.step.status()
            needed = self.demand_of(status)
            if not status.full:
                self.needed = tuple(max(pair) for pair in zip(self.needed, needed, strict=True))
                return
            self.grow_capacity(needed)
        raise RuntimeError(
            f"after {_MOST_TRIES} tries capacities are still exceeded: {status}, capacities {self.capacities}"
        )

    def demand_of(self, status: Status) -> tuple[int, int, int]:
        """Return the capacities that would have been needed, the largest of any pair of ranks; every rank calls it."""
        return status.rows, most_of(all_gather_counts(status.segments, self.world)), status.intersections

    def grow_capacity(self, needed: Sequence[int]) -> None:
        """Rebuild the step with these capacities."""
        # What was counted beyond a full capacity of rows may be too little.
        wanted = [padded(n) for n in needed]
        self.capacities = tuple(
            max(c, w + w // 2 if w > c else w) for w, c in zip(wanted, self.capacities, strict=True)
        )
        self.step = None
        self.step = self._make()

    def advance(self, b: int, rates: dict[str, float] | None = None) -> None:
        """Take a step of a batch."""
        self.number += 1
        lines = [adam_scalars((rates or _STILL)[k], (0.9, 0.999), 1e-15, self.number) for k in ORDER]
        views = self.batches[b]
        parts = [view.viewmat.reshape(-1) for view in views] + [view.K.reshape(-1) for view in views]
        backgrounds = torch.zeros(self.step.backgrounds.numel())
        times = torch.zeros(len(views))
        self._take(b, torch.cat([*parts, backgrounds, torch.tensor(lines).reshape(-1), times]))

    def flush(self) -> None:
        self.step.flush()

    def losses(self) -> list[float]:
        """Return the loss of every view of the batches, in their order."""
        found: list[float] = []
        for b in range(len(self.batches)):
            self.advance(b)
            shares = over_ranks(self.step.report[: self.batch].tolist(), self.world)
            found += [sum(column) for column in zip(*shares, strict=True)]
        self.flush()
        return found

    def first_step(self) -> dict[str, Any]:
        """Return the effect of a first step at splatfacto's rates, and restore the model. The figures must be equal for
        all methods: gradient lengths by parameter (float64 sums), total parameter change, and the model before."""
        params, moments = self.model.params, self.model.moments()
        before = {k: v.clone() for k, v in params.items()}
        self.still_moments()
        self.number = 0
        self.advance(0, RATES)
        self.flush()
        squares = [float(moments[k][0].square().sum(dtype=torch.float64)) * 100 for k in ORDER]
        moved = [float((params[k] - before[k]).abs_().sum(dtype=torch.float64)) for k in ORDER]
        held = [float(before[k].sum(dtype=torch.float64)) for k in ORDER]
        for k, v in params.items():
            v.copy_(before[k])
        self.still_moments()
        self.number = 0
        sums = [sum(column) for column in zip(*over_ranks([*squares, *moved, *held], self.world), strict=True)]
        n = len(ORDER)
        return {
            "gradients": dict(zip(ORDER, [s**0.5 for s in sums[:n]], strict=True)),
            "moved": dict(zip(ORDER, sums[n : 2 * n], strict=True)),
            "model": dict(zip(ORDER, sums[2 * n :], strict=True)),
            "losses": self.losses(),
        }

    def still_moments(self) -> None:
        for both in self.model.moments().values():
            for moment in both:
                moment.zero_()

    def time(self, steps: int) -> dict[str, Any]:
        """Time at least so many steps, as far as a block has them, the same number of every batch; collective.

        Returns:
            ms: of a step: the slowest rank's, median over a batch's steps, mean over batches; a 50th of the flush
            included. ms_by_batch. flush_ms. host_ms: of giving the device a step. wall_ms: by the host's clock.
        """
        count, device = len(self.batches), self.model.device
        cycles = max(1, min(-(-steps // count), (_BLOCK - count) // count))
        assert (cycles + 1) * count <= MOST_STEPS
        self.flush()
        self.step.status()  # resets the counts
        for b in range(count):
            self.advance(b)
        self._wait()
        barrier(self.world)
        clock, began = Clock(device), time.perf_counter()
        clock.mark()
        for _ in range(cycles):
            for b in range(count):
                self.advance(b)
                clock.mark()
        mine = clock.intervals()
        wall = (time.perf_counter() - began) * 1e3 / len(mine)
        slowest = [max(column) for column in zip(*over_ranks(mine, self.world), strict=True)]
        by_batch = [statistics.median(slowest[b::count]) for b in range(count)]
        clock = Clock(device)
        clock.mark()
        self.flush()
        clock.mark()
        flush = max(row[0] for row in over_ranks(clock.intervals(), self.world))
        ms = statistics.mean(by_batch) + (flush / _BLOCK if self._lazy is not None else 0.0)
        self._check_all_taken((cycles + 1) * count)
        bursts: list[float] = []
        for _ in range(3):
            self._wait()
            barrier(self.world)
            began = time.perf_counter()
            for k in range(_BURST):
                self.advance(k % count)
            bursts.append((time.perf_counter() - began) * 1e3 / _BURST)
        self.flush()
        self._wait()
        host, wall = (max(c) for c in zip(*over_ranks([statistics.median(bursts), wall], self.world), strict=True))
        return {
            "ms": ms, "ms_by_batch": by_batch, "flush_ms": flush, "host_ms": host, "wall_ms": wall,
            "images_per_s": 1e3 * self.batch / ms, "steps": cycles * count, "capacities": list(self.capacities),
            "needed": list(self.needed), "memory": memory(self.world),
        }  # fmt: skip

    def _check_all_taken(self, steps: int) -> None:
        status = self.step.status()
        if status.full or status.done != steps:
            raise RuntimeError(f"of {steps} steps not all were taken: {status}, capacities {self.capacities}")
        self.last_status = status

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


class SingleRun(Run):
    """The step of `single` on one GPU, as a CUDA graph: a view a step."""

    def __init__(self, model: CityModel, city_views: CityViews, world: World, lazy: bool, **options: Any) -> None:
        super().__init__(model, city_views, world, 1, lazy, **options)
        self._graph: Work | None = None
        scene = city_views.scene
        self._plan = Plan.of([[Patch(0, 0, 0, scene.width, scene.height)]])
        self._picture = torch.zeros(scene.height, scene.width, 3, dtype=torch.uint8, device=world.device)

    def _make(self) -> Step:
        self._graph = None
        settings = self.settings()
        shape = (settings.rows, settings.segment, settings.words())
        return self.made(settings, single(self.world), OwnRows(self.world, self.kernels, *shape))

    def _take(self, batch: int, inputs: Tensor) -> None:
        self._inputs.upload(inputs)
        self._picture.copy_(self.city_views.images[self.batches[batch][0].index])
        if self._graph is not None:
            self._graph()
        else:
            self._whole()

    def warm_up(self) -> None:
        super().warm_up()
        if self.model.device.type == "cuda":
            self.advance(0)
            self.flush()
            self._graph = captured(self._whole, self.model.device)  # takes a step, too
            self.flush()

    def _whole(self) -> None:
        self.step.take(self._plan, [self._picture])
