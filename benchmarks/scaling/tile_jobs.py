"""Rank job of `benchmarks.tile`: one training method on one scene, checked against `single`, then timed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.rank_jobs import Job, JobFailed
from benchmarks.lib.stopwatch import free
from benchmarks.scaling.city_runs import CityViews, Run, SingleRun
from benchmarks.scaling.gsplat_city import GsplatRun
from benchmarks.scaling.tile_run import Mode, TileRun
from benchmarks.scenes.city_model import CityModel, CityScene, make_model
from ns_multigpu.core.dist.peer_memory import TransportChoice, choose_transport
from ns_multigpu.core.dist.world import World

_TOLERANCES = {"gradients": 2e-3, "moved": 1e-2}
"""Relative, of what a first step makes of the model. Where a gradient is next to nothing, rounding decides which way
Adam's first step goes, but not how far."""
_LOSS_TOLERANCE = 5e-4
_GSPLAT_TOLERANCE = 2e-2
"""gsplat cuts splats off at three sigma."""


def make_worker(world: World, shared: Job) -> Callable[[Job], Job]:
    """Job worker: see `lib.rank_jobs`. `shared`: folder for images; single: its figures by scene name."""
    return _Worker(world, Path(shared["folder"]), shared["single"])


class _Worker:
    def __init__(self, world: World, folder: Path, single: dict[str, Any]) -> None:
        self._world, self._folder, self._single = world, folder, dict(single)
        self._model: tuple[tuple[int, int], CityModel] | None = None
        self._city_views: tuple[CityScene, CityViews] | None = None
        self._transport: TransportChoice | None = None

    def __call__(self, job: Job) -> Job:
        free(self._world.device)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # a GPU that was not used yet has no statistics
            torch.cuda.reset_peak_memory_stats(self._world.device)
        model, city_views = self._prepared(CityScene(**job["scene"]))
        made = {"points_by_rank": list(model.counts), "model_seconds": model.seconds}
        counting = {"counting": job["counts"], "absgrad": job["counts"]}
        if job["kind"] == "gsplat":
            return made | self._gsplat(model, city_views, job)
        if job["kind"] == "single":
            run: Run = SingleRun(model, city_views, self._world, job["lazy"], **counting)
        else:
            mode = Mode(**job["mode"])
            if mode.transport == "peer":
                self._transport = self._transport or choose_transport(self._world, "auto")
                if not self._transport.peer:
                    raise JobFailed(self._transport.reason)
            run = TileRun(model, city_views, self._world, job["batch"], mode, **counting)
        model.moments()
        run.still_moments()
        run.warm_up()
        made["check"] = self._checked(run, city_views.scene.name, job["way"] == "single")
        made |= run.time(job["steps"])
        if isinstance(run, TileRun):
            made["parts"] = run.parts()
        return made

    def _prepared(self, scene: CityScene) -> tuple[CityModel, CityViews]:
        key = (scene.points, scene.blocks)
        if self._model is None or self._model[0] != key:
            self._model = self._city_views = None
            self._model = (key, make_model(scene, self._world))
        if self._city_views is None or self._city_views[0] != scene:
            self._city_views = None
            images = scene.images(self._world, self._folder)
            self._city_views = (scene, CityViews(scene, scene.cameras(), images))
        return self._model[1], self._city_views[1]

    def _checked(self, run: Run, name: str, reference: bool) -> dict[str, Any]:
        """Compare the first step's effect on the model with that of `single`.

        Raises:
            JobFailed: it is something else: what would be timed is another thing. On every rank.
        """
        found = run.first_step()
        if reference:
            self._single[name] = found
        expected = self._single.get(name)
        if expected is None:
            return {**found, "compared": False}
        wrong = differences(found, expected, run.batch, sum(run.model.counts))
        if wrong:
            raise JobFailed("not what `single` does: " + "; ".join(wrong))
        return {**found, "compared": not reference}

    def _gsplat(self, model: CityModel, city_views: CityViews, job: Job) -> Job:
        run = GsplatRun(model, city_views, self._world, job["fused"], job["counts"])
        seen = self._world.rank % len(city_views.views)
        loss = run.loss_of(seen)
        expected = self._single.get(city_views.scene.name)
        if expected is not None and _far(loss, expected["losses"][seen], _GSPLAT_TOLERANCE):
            raise RuntimeError(f"gsplat's loss of view {seen} is {loss}; `single` has {expected['losses'][seen]}.")
        return {"loss": loss, **run.time(job["steps"])}


def differences(found: dict[str, Any], expected: dict[str, Any], batch: int, points: int) -> list[str]:
    """Return the differences of two methods as text; see `Run.first_step`. Gradients of a larger batch differ by
    design."""
    wrong: list[str] = []
    for name, value in expected["model"].items():
        if not abs(found["model"][name] - value) <= 1e-7 * points:
            wrong.append(f"the sum of all {name} was {found['model'][name]}, not {value}")
    if batch == 1:
        for what, tolerance in _TOLERANCES.items():
            for name, value in expected[what].items():
                if _far(found[what][name], value, tolerance):
                    wrong.append(f"{what} of {name}: {found[what][name]}, not {value}")
    pairs: Sequence[tuple[float, float]] = list(zip(found["losses"], expected["losses"], strict=False))
    for view, (loss, right) in enumerate(pairs):
        if _far(loss, right, _LOSS_TOLERANCE):
            wrong.append(f"the loss of view {view}: {loss}, not {right}")
    return wrong


def _far(found: float, expected: float, tolerance: float) -> bool:
    return not abs(found - expected) <= tolerance * abs(expected)
