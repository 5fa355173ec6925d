"""A run of captured steps, as on a GPU, equals the run of launched steps bit for bit.

Graphs are recorded (`tests.lib.recorded`): a replay runs the recorded operators on the memory that they had.
So it shows if a step takes anything from the host that is not among its inputs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.pair_capacities import pairs_of
from ns_multigpu.core.step.step_settings import Status
from ns_multigpu.plugin.blocks import initial_capacity, training
from ns_multigpu.plugin.blocks.graphs import StepGraphs
from ns_multigpu.plugin.blocks.training import Training
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.lib.ranks import run_ranks
from tests.lib.tile_training_run import MODEL, Outcome, train_model
from tests.lib.training_run import POINTS, write_capture
from tests.plugin.blocks.tried_steps import SMALL_CAPACITY, start_with_small_capacity, take_from_graphs

IMAGES = 84
VIEWS = {False: 2, True: 3}
"""Of a step; where they are cut, one is by two ranks."""
# Refinements from image 16 on, an opacity reset at 48, another resolution from 24, harmonics every 12. Adam's eps is so
# small that steps are deferred.
OPTIONS: dict[str, Any] = {
    "fused_steps": "always", MODEL + "warmup_length": 4, MODEL + "refine_every": 8, MODEL + "reset_alpha_every": 6,
    MODEL + "sh_degree_interval": 12, MODEL + "densify_grad_thresh": 0.001, MODEL + "cull_alpha_thresh": 0.06,
    MODEL + "stop_screen_size_at": 0, MODEL + "num_downscales": 1, MODEL + "resolution_schedule": 24,
    MODEL + "stop_split_at": 48,
    **{f"optimizers.{name}.optimizer.eps": 1e-15 for name in ORDER},
}  # fmt: skip


def both(world: World, capture: Path, runs: Path, tile: bool) -> list[dict[str, Any]]:
    """Return the launched run and the captured run, each with its numbers of launched, replayed and retried steps, and
    of plans."""
    return [_go(world, capture, runs / name, tile, name == "captured") for name in ("launched", "captured")]


def _go(world: World, capture: Path, runs: Path, tile: bool, captured: bool) -> dict[str, Any]:
    seen: dict[str, Any] = {"launched": 0, "replayed": 0, "full": 0, "deferred": 0, "plans": set()}
    learn, flush = Training._learn, training.Step.flush
    take, launched, replayed = StepGraphs.take, StepGraphs._as_it_comes, StepGraphs._replay

    def recorded(self: Training, status: Status, *again: Any) -> None:
        seen["full"] += status.full
        learn(self, status, *again)

    def flushed(self: Any) -> None:
        lazy = self._model.lazy
        seen["deferred"] += int((lazy.last < lazy.steps).sum())
        flush(self)

    def counted(kind: str, usual: Any) -> Any:
        def count(self: StepGraphs, *args: Any) -> Any:
            seen[kind] += 1
            return usual(self, *args)

        return count

    def planned(self: StepGraphs, plan: Any, parts: Any, steps: int) -> Any:
        assert steps == 1, "blocks are of one step here"
        seen["plans"].add(plan)
        return take(self, plan, parts, steps)

    with pytest.MonkeyPatch.context() as patch:
        take_from_graphs(patch, captured)
        start_with_small_capacity(patch)
        patch.setattr(initial_capacity, "rows_needed", lambda *_: pairs_of(SMALL_CAPACITY[1], world.size))
        patch.setattr(Training, "_learn", recorded)
        patch.setattr(training.Step, "flush", flushed)
        patch.setattr(StepGraphs, "take", planned)
        patch.setattr(StepGraphs, "_as_it_comes", counted("launched", launched))
        patch.setattr(StepGraphs, "_replay", counted("replayed", replayed))
        views = VIEWS[tile] if tile else VIEWS[tile] // world.size
        steps = IMAGES // VIEWS[tile]
        outcome: Outcome = train_model(world, tile, capture, runs, OPTIONS, steps, views, double=False)
    return {**outcome, **seen, "plans": len(seen["plans"])}


@pytest.mark.parametrize(("ranks", "tile"), [(1, False), (2, True)], ids=["batch", "tile"])
def test_replayed_steps_are_the_launched_ones(ranks: int, tile: bool, tmp_path: Path) -> None:
    write_capture(tmp_path / "capture", wide=False, taller=24 if tile else 0)
    for launched, captured in run_ranks(both, ranks, tmp_path / "capture", tmp_path / "runs", tile):
        print({k: (launched[k], captured[k]) for k in ("launched", "replayed", "full", "deferred", "plans", "points")})
        assert launched["replayed"] == 0 and captured["replayed"] > IMAGES // VIEWS[tile] // 2, "half of them"
        assert launched["launched"] == captured["launched"] + captured["replayed"]
        assert launched["launched"] > IMAGES // VIEWS[tile], "some were retried"
        assert launched["full"] == captured["full"] > 1, "capacities must have been exceeded, and not at first alone"
        assert launched["deferred"] == captured["deferred"] > 0
        assert launched["plans"] == captured["plans"]
        counts = [count for _, count in captured["points"]]
        assert captured["points"] == launched["points"] and len({POINTS * (1 if tile else ranks), *counts}) > 2
        assert captured["metrics"] == launched["metrics"]
        for kind in ("parameters", "moments"):
            assert captured[kind].keys() == launched[kind].keys()
            for name, value in launched[kind].items():
                assert torch.equal(captured[kind][name], value), name
