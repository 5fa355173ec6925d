"""Runs of `splatfacto-locality`: the model of `tile`, on with as many ranks bit for bit, and with others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import rows as checkpoint_rows
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from tests.lib.ranks import run_ranks
from tests.lib.resuming import DENSIFIERS, Model, differing, everything, in_double, part_of, whole, without_rates
from tests.lib.tile_training_run import MODEL
from tests.lib.training_run import follow
from tests.strategies.test_law import on_machines

pytestmark = pytest.mark.slow

STEPS, SAVED, VIEWS = 24, 12, 2
OTHERS = {"three machines": (3, 3, "locality"), "ranges": (2, 1, "tile"), "replicas": (1, 1, "batch")}


def train_all(world: World, capture: Path, out: Path, densifier: str, fused: str) -> dict[str, Any]:
    """Return differences between runs, on rank 0. `points` are the final numbers of each rank."""
    checkpoint_rows.BLOCK = 7
    report: dict[str, Any] = {}
    models: dict[str, Model] = {}
    own: dict[str, Model] = {}

    def run(name: str, size: int, machines: int, strategy: str, **more: Any) -> None:
        part = part_of(world, size)
        if part is not None:
            options = {"views_per_step": VIEWS, "morton_order": True, "fused_steps": fused, "keep_checkpoints": 0}
            options |= {**DENSIFIERS[densifier], **more}
            trainer = in_double(
                on_machines(part, machines), capture, out / name, STEPS, method=f"splatfacto-{strategy}", **options
            )
            models[name], own[name] = whole(trainer, part), everything(trainer)
            report[f"points {name}"] = all_gather_objects(trainer.pipeline.model.num_points, part)
            means = trainer.pipeline.model.means.detach()
            report[f"held {name}"] = {tuple(round(x, 3) for x in point) for point in means.tolist()}
            owners = getattr(trainer.pipeline.strategy.placement, "group_owners", None)
            report[f"owners {name}"] = None if owners is None else (owners.points, owners.owners.tolist())
        dist.barrier(group=world.control)

    run("ranges from the start", 2, 1, "tile")
    run("machines", 2, 2, "locality", steps_per_save=SAVED)
    saved = out / "machines" / "run" / "splatfacto-locality" / "now" / "nerfstudio_models"
    load: dict[str, Any] = {"load_dir": saved, "load_step": SAVED}
    run("again", 2, 2, "locality", **load)
    for name, (size, machines, strategy) in OTHERS.items():
        run(name, size, machines, strategy, **load)
    if "machines" in models:
        report["again"] = differing(own["again"], own["machines"])
    if world.is_main:
        for name in ("ranges from the start", *OTHERS):
            report[name] = differing(without_rates(models[name]), without_rates(models["machines"]), 1e-7)
    return report


@pytest.mark.parametrize("densifier", ["splits", "mcmc by gradients"])
def test_locality_trains_the_model_of_ranges(tmp_path: Path, capture: Path, densifier: str) -> None:
    reports = run_ranks(train_all, 3, capture, tmp_path, densifier, "never")
    assert [report["again"] for report in reports[:2]] == [[], []], "as many ranks go on bit for bit"
    for name in ("ranges from the start", *OTHERS):
        assert reports[0][name] == [], name
    points = {name: reports[0][f"points {name}"] for name in ("ranges from the start", "machines", *OTHERS)}
    assert len({sum(counts) for counts in points.values()}) == 1 and sum(points["machines"]) != 60
    moved = reports[0]["held machines"] ^ reports[0]["held ranges from the start"]
    assert len(moved) > 8, "who owns what is not said by ranges"
    assert reports[0]["owners again"] == reports[0]["owners machines"], "groups' owners were saved, and read"
    assert set(reports[0]["owners three machines"][1]) == {0, 1, 2}


FUSED: dict[str, Any] = {
    "fused_steps": "always", "pipeline.views_per_step": VIEWS, "logging.steps_per_log": 6,
    MODEL + "morton_order": True, MODEL + "num_downscales": 1, MODEL + "resolution_schedule": 20,
    MODEL + "warmup_length": 2, MODEL + "refine_every": 6, MODEL + "camera_optimizer.mode": "off",
    MODEL + "densify_grad_thresh": 1e-4, MODEL + "max_gaussians": 400,
}  # fmt: skip


def rows_of(trainer: DistributedTrainer) -> list[dict[str, Any]]:
    """Return what a run has logged, on rank 0."""
    written = trainer.config.get_base_dir() / "metrics.jsonl"
    return [json.loads(line) for line in written.read_text().splitlines()] if trainer.world.is_main else []


def fused(world: World, capture: Path, out: Path) -> dict[str, Any]:
    """Fused steps of each strategy; of `locality` on machines of one rank, with plans made ahead."""
    report: dict[str, Any] = {}
    for strategy in ("tile", "locality"):
        options = FUSED | ({"pipeline.locality.plans": "ahead"} if strategy == "locality" else {})
        part = on_machines(world, world.size if strategy == "locality" else 1)
        begun: list[list[int]] = []

        def ready(trainer: DistributedTrainer, begun: list[list[int]] = begun) -> None:
            """Have each image wanted by the other machine whenever points were placed again."""
            pipeline: Any = trainer.pipeline
            move, placement = pipeline.move_images, pipeline.strategy.placement

            def swap_all() -> None:
                begun.append(list(pipeline.datamanager.train_share.owners))
                placement.group_owners = replace(placement.group_owners, view_machines=1 - np.array(begun[-1]))
                move()

            pipeline.move_images = swap_all

        trainer = follow(
            part, capture, out / strategy, options, 3 * STEPS, VIEWS, method=f"splatfacto-{strategy}", double=False,
            ready=ready,
        )  # fmt: skip
        data = trainer.pipeline.datamanager
        report[strategy] = {
            "rows": rows_of(trainer),
            "points": trainer.pipeline.model.total_points,
            "begun": begun,
            "owners": data.train_share.owners,
            "held": data.train_share.own,
        }
    return report


def test_fused_steps_with_plans_made_ahead(tmp_path: Path, capture: Path) -> None:
    reports = run_ranks(fused, 2, capture, tmp_path)
    tile, locality = (reports[0][strategy]["rows"] for strategy in ("tile", "locality"))
    for one, other in zip(tile, locality, strict=True):
        assert one["main_loss"] == pytest.approx(other["main_loss"], rel=0.02), one["step"]
    assert reports[0]["tile"]["points"] == pytest.approx(reports[0]["locality"]["points"], rel=0.05)
    last = locality[-1]
    assert all(0 <= row["plan_misses"] <= 1 for row in locality) and last["plan_misses"] < 1, "some were in time"
    assert 0 < last["splats_between_machines"] == last["splats_sent"], "each rank is a machine"
    most = 4 * (12 + 9) * last["splats_between_machines"]  # a row and its gradients for each patch of a splat
    assert 0 < last["bytes_between_machines"] < most, "once for several patches"
    assert 1.5 < last["bytes_between_machines"] / last["bytes_per_step"] < 3, "of both ranks"
    assert all(row[f"busiest_{who}"] >= 1 for row in locality for who in ("sender", "receiver", "drawer"))
    assert "plan_misses" not in tile[-1]
    for rank, report in enumerate(reports):
        images = report["locality"]
        assert images["held"] == [view for view, home in enumerate(images["owners"]) if home == rank]
        before = images["begun"][-1]
        moved = [(a, b) for a, b in zip(before, images["owners"], strict=True) if a != b]
        assert len(moved) == 2 * min(before.count(0), before.count(1)) > 0, "machines swapped what they could"
