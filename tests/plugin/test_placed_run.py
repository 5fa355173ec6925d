"""Runs whose ranks own half-spaces: the model of `tile`, and other ranks and other strategies go on with it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ns_multigpu.core.assignment import TileRanges
from ns_multigpu.core.collectives import all_gather_objects
from ns_multigpu.core.legs import GradientsToOwner, WholePixels
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.tile_work import TileWork
from ns_multigpu.core.travelling_rows import ExchangedRows
from ns_multigpu.core.world import World
from ns_multigpu.plugin.checkpoint import rows as checkpoint_rows
from ns_multigpu.plugin.train.trainer import DistributedTrainer
from strategies import STRATEGIES
from tests.placements import HalfSpaces, Scattered
from tests.plugin.course import write_capture
from tests.plugin.resuming import differing, everything, in_double, part_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS, SAVED, VIEWS = 24, 12, 2
DENSIFIERS: dict[str, dict[str, Any]] = {
    "splits": {},
    "mcmc": {"densifier": "mcmc", "max_gs_num": 80, "mcmc_min_opacity": 0.095, "noise_lr": 5e3},
    "mcmc by gradients": {
        "densifier": "mcmc",
        "max_gs_num": 80,
        "mcmc_min_opacity": 0.095,
        "noise_lr": 5e3,
        "mcmc_picks": "both",
    },
}
OTHERS = {"three ranks": (3, "halves"), "ranges": (2, "tile"), "scattered": (2, "scattered"), "replicas": (1, "batch")}
Model = dict[str, Tensor]


def add_strategies() -> None:
    """`tile` with other placements, in this process."""
    for name, placement in (("halves", HalfSpaces()), ("scattered", Scattered())):

        def spread(world: World, name: str, placement: Any) -> Strategy:
            work = TileWork()
            legs = ExchangedRows(work), WholePixels(), GradientsToOwner(world)
            return Strategy(name, placement, TileRanges(work), *legs, world)

        STRATEGIES[name] = partial(spread, name=name, placement=placement)


def whole(trainer: DistributedTrainer, world: World) -> Model:
    """What all ranks hold, by place."""
    model, found = trainer.pipeline.model, everything(trainer)
    places = None if model.holding is None else model.holding.places
    parts = all_gather_objects((found, places), world)
    order = None if places is None else torch.sort(torch.cat([some for _, some in parts])).indices
    spread: list[str] = []
    if model.sharded:
        groups = tuple(f"{name}/0/" for name in model.gauss_params)
        spread = [name for name in found if name.startswith(("model/gauss_params.", "densifier/", *groups))]
        spread = [name for name in spread if found[name].dim() > 0]
    joined = {name: torch.cat([part[name] for part, _ in parts]) for name in spread}
    return found | {name: value if order is None else value[order] for name, value in joined.items()}


def courses(world: World, capture: Path, out: Path, densifier: str) -> dict[str, Any]:
    """What differs between courses; on the first rank. `points` are those of each rank in the end."""
    add_strategies()
    checkpoint_rows.BLOCK = 7
    report: dict[str, Any] = {}
    models: dict[str, Model] = {}
    own: dict[str, Model] = {}

    def run(name: str, size: int, strategy: str, **more: Any) -> None:
        part = part_of(world, size) if size > 1 else (World.single() if world.is_main else None)
        if part is not None:
            options = {"strategy": strategy, "views_per_step": VIEWS, "morton_order": True, "fused_steps": "never"}
            options |= {"keep_checkpoints": 0, **DENSIFIERS[densifier], **more}
            method = "splatfacto-batch" if strategy == "batch" else "splatfacto-tile"
            trainer = in_double(part, capture, out / name, STEPS, method=method, **options)
            models[name], own[name] = whole(trainer, part), everything(trainer)
            report[f"points {name}"] = all_gather_objects(trainer.pipeline.model.num_points, part)
        dist.barrier(group=world.control)

    run("ranges from the start", 2, "tile")
    run("halves", 2, "halves", steps_per_save=SAVED)
    saved = out / "halves" / "run" / "splatfacto-tile" / "now" / "nerfstudio_models"
    load: dict[str, Any] = {"load_dir": saved, "load_step": SAVED}
    assert (saved / f"step-{SAVED:09d}.ckpt").is_file(), sorted(saved.iterdir())
    run("again", 2, "halves", **load)
    for name, (size, strategy) in OTHERS.items():
        run(name, size, strategy, **load)
    if "halves" in models:
        report["again"] = differing(own["again"], own["halves"])
    if world.is_main:
        for name in ("ranges from the start", *OTHERS):
            kept = {k: v for k, v in models[name].items() if "rate" not in k}
            report[name] = differing(kept, {k: models["halves"][k] for k in models["halves"] if "rate" not in k}, 1e-7)
    return report


@pytest.mark.parametrize("densifier", DENSIFIERS)
def test_half_spaces_train_the_model_of_ranges(tmp_path: Path, densifier: str) -> None:
    write_capture(tmp_path / "capture", wide=False)
    reports = run_ranks(courses, 3, tmp_path / "capture", tmp_path, densifier)
    assert [report["again"] for report in reports[:2]] == [[], []], "as many ranks go on bit for bit"
    for name in ("ranges from the start", *OTHERS):
        assert reports[0][name] == [], name
    points = {name: reports[0][f"points {name}"] for name in ("ranges from the start", "halves", *OTHERS)}
    assert len({sum(counts) for counts in points.values()}) == 1 and sum(points["halves"]) != 60
    assert points["halves"] != points["ranges from the start"]
