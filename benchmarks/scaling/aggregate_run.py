"""Fused steps of the device `multigpu` over the views of a city: `tile` over all GPUs, in one process."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.lockstep import Inputs
from benchmarks.scaling.city_runs import RATES, CityViews, Run, SingleRun, bands_in
from benchmarks.scenes.city_model import CityModel, CityScene, make_model
from cuda_ext import LazyAdam
from ns_multigpu.core.dist.members import Members
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.delayed_readback import DelayedReadback
from ns_multigpu.core.step.step_settings import with_halos
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer
from strategies.tile import tile

_CYCLES = 12
"""Times that a block of steps shows each view; then deferred steps are applied, as in training."""
_BURST = 4
"""Steps that the host may be ahead without waiting for the devices."""


class AggregateRun(Run):
    """See `Run`: a view a step, by the members of the device, on which the model is."""

    def __init__(self, model: CityModel, city_views: CityViews) -> None:
        from ns_multigpu import aggregate  # registers the device, for this process alone

        self._aggregate, self._members = aggregate, Members(aggregate.devices())
        devices = aggregate.devices()
        super().__init__(model, city_views, World.single(devices[0]), 1, False)
        rows = aggregate.member_rows(model.params["means"])
        self._options = [{"lazy": LazyAdam.make(len(own), own.device)} for own in rows]
        self._strategies = [tile(world) for world in self._members.worlds]
        self._counts = DelayedReadback(self._strategies[0].assignment.learn)
        self._images = [[image.to(device) for image in city_views.images] for device in devices]
        self._pictures = [torch.zeros_like(images[0])[None] for images in self._images]
        timer = StepTimer(torch.device("cpu"))  # the host's: events of the device would count, too
        self._graphs = [
            StepGraphs(timer, lambda: None, GraphPool(device)) for device in devices if device.type == "cuda"
        ]

    def _make(self) -> Any:
        for graphs in self._graphs:
            graphs.forget()
        step = self._aggregate.fused_steps(
            self._members, self._strategies, self.kernels, self.model.params, self.model.moments(), self.statistics,
            self.settings(), self._options,
        )  # fmt: skip
        self._inputs = Inputs(step.inputs)
        return step

    def _take(self, batch: int, inputs: Tensor) -> None:
        views = self.batches[batch]
        self._counts.learn()
        plan = with_halos(self._strategies[0].plan_alike(views), views)
        targets = [
            bands_in(pictures, patches, views, images)
            for pictures, patches, images in zip(self._pictures, plan.drawn, self._images, strict=True)
        ]
        self._inputs.upload(inputs)
        if self._graphs:
            self.step.take(plan, targets, launch=lambda rank, parts: self._graphs[rank].parts(plan, parts))
        else:
            self.step.take(plan, targets)
        self._counts.send(views, self.step.measured_work, self.step.taken)

    def flush(self) -> None:
        super().flush()
        self._counts.learn(pending=0)

    def warm_up(self) -> None:
        """See `Run.warm_up`. Afterwards the plans are those of measured work, and their graphs are captured."""
        super().warm_up()
        for _ in range(4):
            self.losses()


def fused_training(
    points: int, width: int, height: int, gpus: int, device: str, wait: Callable[[], None]
) -> dict[str, float]:
    """Return milliseconds of a fused step of a view, those that the host takes to launch it, and the sum of the views'
    losses before the first step and after some at splatfacto's rates.

    Args:
        gpus: members of the device; 0 for `single` on torch's own device. device: "cuda" or "cpu".
        wait: waits for all devices.
    """
    scene, world = CityScene(points, width, height, views=4), World.single(device)
    views = CityViews(scene, scene.cameras(), scene.images(world))
    model = make_model(scene, world)
    run: Run = SingleRun(model, views, world, lazy=True)
    if gpus:
        params = {name: value.to("multigpu") for name, value in model.params.items()}
        run = AggregateRun(CityModel(params, [points], {}), views)
    del model
    run.warm_up()
    first, count = sum(run.losses()), len(run.batches)

    def block() -> None:
        for _ in range(_CYCLES):
            for batch in range(count):
                run.advance(batch)
        run.flush()

    def milliseconds(work: Callable[[], None], steps: int) -> float:
        wait()
        began = time.perf_counter()
        work()
        host = time.perf_counter()
        wait()
        return 1e3 * ((time.perf_counter() if steps > _BURST else host) - began) / steps

    block()
    ms = min(milliseconds(block, _CYCLES * count) for _ in range(3))
    burst = lambda: [run.advance(batch % count) for batch in range(_BURST)] and None  # noqa: E731
    host = min(milliseconds(burst, _BURST) for _ in range(3))
    run.flush()
    if run.step.status().full:
        raise RuntimeError(f"a capacity was exceeded: {run.capacities}")
    for _ in range(2):
        for batch in range(count):
            run.advance(batch, RATES)
    run.flush()
    return {"ms": ms, "host ms": host, "first": first, "last": sum(run.losses())}
