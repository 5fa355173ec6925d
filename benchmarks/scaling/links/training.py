"""Steps of a strategy as `ns-train` takes them, timed: on a city that needs no images, and with a model that stays."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.lockstep import over_ranks
from benchmarks.scaling.links.bare_city import BareCityConfig, GrownModelConfig
from benchmarks.scaling.links.limiting import is_limited, passed
from benchmarks.scenes.city_model import CityScene
from ns_multigpu import methods
from ns_multigpu.city.capture import Kind
from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks.fused_blocks import FusedBlocks
from ns_multigpu.plugin.run.trainer import DistributedTrainer

STRATEGIES = ("batch", "tile", "locality", "pixel")
VARIANTS = ("mixed", "hide", "at-once")
"""Of pixel: views in random order; parts of cells that contribute nothing left out; the pixels of a batch exchanged at
once, not in halves."""
_STILL = 1e-12
"""A learning rate that leaves the model as it is."""
_NEVER = 10**8


class Timed:
    """A run of a strategy; collective.

    Args:
        world: the ranks. way: of `STRATEGIES` or `VARIANTS`. scene: the model and the views' sizes. kind: of views.
        views: of a step.
        folder: where the run may write.
    """

    def __init__(self, world: World, way: str, scene: CityScene, kind: Kind, views: int, folder: Path) -> None:
        strategy = "pixel" if way in VARIANTS else way
        self._world = world
        config: Any = copy.deepcopy(getattr(methods, f"splatfacto_{strategy}").config)
        config.machine.device_type, config.vis = world.device.type, ""
        config.output_dir, config.timestamp, config.experiment_name = folder, strategy, f"{scene.points}-{way}"
        config.max_num_iterations, config.max_num_images, config.batch_scaling = _NEVER, None, "none"
        config.steps_per_checksum = config.steps_per_numeric_check = 0
        config.steps_per_eval_image = config.steps_per_eval_all_images = config.steps_per_save = _NEVER
        config.logging.steps_per_log, config.logging.local_writer.enable = _NEVER, False
        config.fused_steps = "auto" if world.device.type == "cuda" else "always"
        pipeline = config.pipeline
        pipeline.views_per_step = views
        pipeline.datamanager.dataparser = BareCityConfig(scene=scene, kind=kind)
        model = GrownModelConfig(scene=scene)
        model.num_downscales, model.sh_degree_interval, model.refine_every = 0, 1, _NEVER
        pipeline.model = model
        if strategy == "pixel":
            pipeline.pixel.level_steps, pipeline.pixel.hide = way != "mixed", way == "hide"
        for group in config.optimizers.values():
            group["optimizer"].lr, group["scheduler"] = _STILL, None
        config.get_base_dir().mkdir(parents=True, exist_ok=True)
        torch.manual_seed(7)
        with _in(world):
            self._trainer = DistributedTrainer(config)
            self._trainer.setup()
        trainer = self._trainer
        trainer.guards.numbers.prepare(trainer.optimizers.optimizers)
        given = (trainer.config, trainer.pipeline, trainer.optimizers, world, trainer.guards)
        fused = FusedBlocks.if_asked_for(*given, 0)
        if fused is None:
            raise RuntimeError("steps are not fused: see above why")
        if way == "at-once":
            trainer.pipeline.strategy.pixels.fast_links = True
        self._fused, self._next, self._views = fused, 0, views

    def take(self, steps: int) -> None:
        """Take so many steps, in blocks as long as a run's."""
        end = self._next + steps
        while self._next < end:
            block = self._fused.training.block(self._next, end)
            self._fused.take(block, metrics=False)
            self._next = block.stop

    def time(self, steps: int, blocks: int) -> dict[str, Any]:
        """Time blocks of so many steps.

        Returns:
            images_per_s, ms a step, the slowest rank's: of all blocks, ms_by_block. bytes: that a rank says it sends a
            step, the mean. By rank: wire, bytes that its link takes a step, and waited, the part of the time in which
            something waits for it, where it is limited; compute, exchange and others: the parts of the time, the
            device's. figures: what the strategy logs.
        """
        world, pipeline = self._world, self._trainer.pipeline
        pipeline.timer.take()
        pipeline.strategy.assignment.figures()
        world.traffic.since("links")
        before = passed() if is_limited() else None
        times: list[float] = []
        for _ in range(blocks):
            self._meet()
            began = time.perf_counter()
            self.take(steps)
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        own = sum(times)
        after = passed() if is_limited() else None
        sent, parts = world.traffic.since("links") / (steps * blocks), pipeline.timer.take()
        names = ("compute", "exchange", "data", "waiting for the device")
        numbers = [sent, *(parts.get(name, 0.0) / own for name in names)]
        if before is not None and after is not None:
            numbers += [(after.sent - before.sent) / (steps * blocks)]
            numbers += [(after.sending_waited - before.sending_waited) / own]
        slowest = [max(column) for column in zip(*over_ranks(times, world), strict=True)]
        rows = over_ranks(numbers, world)
        columns = [[round(n, 4) for n in column] for column in zip(*rows, strict=True)]
        ms = 1e3 * sum(slowest) / (steps * blocks)
        return {
            "ms": ms, "images_per_s": 1e3 * self._views / ms, "ms_by_block": [1e3 * t / steps for t in slowest],
            "bytes": sum(columns[0]) / len(rows), **dict(zip(names, columns[1:5], strict=True)),
            **dict(zip(("wire", "waited"), columns[5:], strict=False)),
            "figures": pipeline.strategy.assignment.figures(), "gaussians": pipeline.model.total_points,
        }  # fmt: skip

    def _meet(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        barrier(self._world)


@contextmanager
def _in(world: World) -> Iterator[None]:
    """Make trainers that are created here belong to these ranks, which are connected already."""
    found = World.from_env
    World.from_env = staticmethod(lambda *_, **__: world)  # type: ignore[method-assign]
    try:
        yield
    finally:
        World.from_env = found  # type: ignore[method-assign]
