"""A run of `locality` shows its partition and what its plans come to: partition.png, metrics.jsonl and TensorBoard."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.locality.placing import ByViews
from ns_multigpu.locality.rules import Access
from ns_multigpu.plugin.render.palette import machine_color, rank_colors
from ns_multigpu.plugin.render.partition_picture import PARTITION
from ns_multigpu.plugin.splats import objective
from ns_multigpu.plugin.splats.objective import PartitionPicture
from tests.lib.ranks import run_ranks
from tests.lib.rendering import make_pipeline
from tests.lib.training_run import follow
from tests.strategies.test_law import on_machines

FIGURES = (
    "splats_between_machines", "splats_sent", "busiest_sender", "busiest_receiver", "busiest_drawer", "plan_misses",
)  # fmt: skip


def _run(world: World, capture: Path, runs: Path, method: str, steps: int) -> dict[str, Any]:
    drawn: list[int] = []

    def ready(trainer: Any) -> None:
        placement = trainer.pipeline.strategy.placement
        if steps > 2 and method.endswith("locality"):
            after = trainer._update_viewer_state

            def place_again(step: int) -> None:
                after(step)
                if step == 1:  # as a refinement would
                    where = trainer.pipeline.model.gauss_params["means"].detach()[:40]
                    placement._place(where.new_ones(40, 3).cumsum(0), 40)
                    if world.is_main:  # a picture of before is gone: another one has to come
                        drawn.append((trainer.base_dir / PARTITION).exists())
                        (trainer.base_dir / PARTITION).unlink(missing_ok=True)

            trainer._update_viewer_state = place_again

    options = {
        "logging.steps_per_log": 2,
        "vis": "tensorboard",
        "pipeline.views_per_step": 2,
        "pipeline.model.num_downscales": 0,
    }
    trainer = follow(on_machines(world, 2), capture, runs, options, steps, 1, method=method, double=False, ready=ready)
    return {"folder": trainer.base_dir, "drawn": drawn, "placings": trainer.pipeline.strategy.placement.placings}


def _colors(file: Path) -> set[tuple[int, int, int]]:
    with Image.open(file) as picture:
        assert picture.size == (1000, 800)
        found = picture.convert("RGB").crop((0, 60, 760, 800)).getcolors(1 << 20)
    assert found is not None
    return {color for _, color in found}  # type: ignore[misc]


def _rounded(color: tuple[float, float, float]) -> tuple[int, ...]:
    return tuple(round(255 * part) for part in color)


def test_a_run_of_locality_shows_its_partition_and_its_plans(capture: Path, tmp_path: Path) -> None:
    main, other = run_ranks(_run, 2, capture, tmp_path, "splatfacto-locality", 5)
    assert main["placings"] == other["placings"] == 2, "at the start, and when it was placed again"
    assert main["drawn"] == [True], "a picture was there before the first step"
    file = main["folder"] / PARTITION
    assert file.is_file() and other["folder"] == main["folder"], "machines share a run folder"
    assert {_rounded(color) for color in rank_colors(2, 1)} <= _colors(file)
    assert {_rounded(machine_color(machine)) for machine in range(2)} <= _colors(file)
    rows = [json.loads(line) for line in (main["folder"] / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(main["folder"]))
    events.Reload()
    for name in FIGURES:
        logged = {row["step"]: row[name] for row in rows}
        shown = {event.step: event.value for event in events.Scalars(f"Step/{name}")}
        assert list(shown) == [0, 2, 4] and shown == pytest.approx(logged, rel=1e-5), name
    assert rows[-1]["splats_sent"] > 0 and rows[-1]["busiest_drawer"] >= 1.0


def test_a_partition_into_ranges_is_drawn_once(capture: Path, tmp_path: Path) -> None:
    main, _ = run_ranks(_run, 2, capture, tmp_path, "splatfacto-tile", 2)
    assert main["placings"] == 0
    colors = _colors(main["folder"] / PARTITION)
    assert {_rounded(color) for color in rank_colors(2, 1)} <= colors and (250, 250, 250) in colors, "no homes"


def test_replicated_points_have_no_partition_picture(capture: Path, tmp_path: Path) -> None:
    main, _ = run_ranks(_run, 2, capture, tmp_path, "splatfacto-batch", 2)
    assert not (main["folder"] / PARTITION).exists()


def _nowhere_to_write(world: World, capture: Path, runs: Path) -> None:
    pipeline = make_pipeline(world, capture, bounds=(0, 40, 90))
    said: list[str] = []
    objective.CONSOLE.print = lambda text, **_: said.append(str(text))  # type: ignore[method-assign]
    folder = runs / "not there"
    picture = objective.PartitionPicture(pipeline.model, torch.zeros(0, 3, 4), world, folder)
    assert picture.due
    picture.draw()
    assert not picture.due
    assert len(said) == (1 if world.is_main else 0)
    assert all("cannot be written" in text and "Training goes on" in text for text in said)


def _of_other_views(world: World, capture: Path, folder: Path) -> None:
    pipeline = make_pipeline(world, capture, bounds=(0, 40, 90))
    type(pipeline.strategy.placement).view_owners = (0, 1, 0)  # type: ignore[assignment, method-assign]
    poses = torch.eye(4)[None, :3].repeat(4, 1, 1)
    objective.PartitionPicture(pipeline.model, poses, world, folder).draw()


def test_owners_of_foreign_views_are_not_shown(capture: Path, tmp_path: Path) -> None:
    run_ranks(_of_other_views, 2, capture, tmp_path)
    assert (250, 250, 250) in _colors(tmp_path / PARTITION)


def test_failing_disk_does_not_end_a_run(capture: Path, tmp_path: Path) -> None:
    run_ranks(_nowhere_to_write, 2, capture, tmp_path)


def test_other_placement_than_requested_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = torch.rand(8, 3)
    placement = ByViews(replace(World.single(), size=2), LocalityOptions(), Access(16, 2))
    placement.look(lambda: [View(torch.eye(4), torch.eye(3), 64, 64)])  # shows none of them
    placement.shares(8, lambda: where - 100, 2)
    model: Any = SimpleNamespace(
        shard_index=ShardIndex(placement), shard_counts=[8], total_points=8, gauss_params={"means": where}
    )
    picture = PartitionPicture(model, torch.eye(4)[None, :3], World.single(), tmp_path)
    picture.draw()
    said = " ".join(capsys.readouterr().out.split())
    assert "Points are placed by ranges of the Z-order: no training view shows any." in said
    assert "Map of which worker stores which Gaussians: /" in said and "partition.png" in said
    picture.draw()
    assert "Z-order" not in capsys.readouterr().out
