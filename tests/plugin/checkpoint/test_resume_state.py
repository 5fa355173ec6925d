"""State that a run resumes besides its model: random generators, and the work of each view in `tile`."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.training_state import Clock
from ns_multigpu.plugin.run import checkpoints
from ns_multigpu.plugin.splats import state
from tests.lib.ranks import run_ranks
from tests.lib.resuming import differing, everything, start
from tests.lib.training_run import write_capture

ALONE = World.single()


def _draws() -> list[float]:
    """Return the next numbers of all generators."""
    return [*torch.rand(2).tolist(), random.random(), float(np.random.rand())]  # noqa: NPY002 - nerfstudio draws so


def test_generators_resume_their_state(tmp_path: Path) -> None:
    write_capture(tmp_path / "capture")
    before = start(ALONE, tmp_path / "capture", tmp_path / "before", 10)
    _draws()
    assert before.checkpoints.save(4)
    expected = _draws()
    _draws()
    start(ALONE, tmp_path / "capture", tmp_path / "after", 10, load_dir=before.checkpoint_dir)
    assert _draws() == expected


VIEW_COSTS = [[0, 700, 30], [3, 40, 500], [-1, 0, 1, 2]]
"""The work of the rows of tiles of two views, and cuts that were made."""
OTHERS = "Its training views, or the way they are drawn, were others"


@pytest.mark.parametrize(
    ("train", "options", "same"),
    [(8, {}, True), (7, {}, False), (8, {"train_cameras_sampling_seed": 5}, False)],
    ids=["the same", "another capture", "another seed"],
)
def test_unknown_views_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: int, options: dict[str, Any], same: bool
) -> None:
    """Other views, or another order, have no recorded costs, and a message says so."""
    for name, count in (("one", 8), ("other", train)):
        write_capture(tmp_path / name, train=count)
    tile: dict[str, Any] = {"method": "splatfacto-tile", "camera_optimizer": CameraOptimizerConfig(mode="off")}
    before = start(ALONE, tmp_path / "one", tmp_path / "before", 10, **tile)
    before.pipeline.strategy.assignment.load_state(VIEW_COSTS)
    assert before.checkpoints.save(4)
    said: list[str] = []
    monkeypatch.setattr(checkpoints, "_print", lambda line, _="": said.append(line))
    after = start(ALONE, tmp_path / "other", tmp_path / "after", 10, **tile, load_dir=before.checkpoint_dir, **options)
    assert after.pipeline.strategy.assignment.state() == (VIEW_COSTS if same else [])
    assert any(OTHERS in line for line in said) != same
    assert said[0].startswith("Resuming at step 5 from ") and said[0].endswith(" 1 image per step.")
    assert not any("written by" in line for line in said), "by as many workers, with as many images per step"


def test_what_one_strategy_measured_is_not_read_by_another(tmp_path: Path) -> None:
    write_capture(tmp_path / "one", train=8)
    fixed = {"camera_optimizer": CameraOptimizerConfig(mode="off")}
    before = start(ALONE, tmp_path / "one", tmp_path / "before", 10, method="splatfacto-tile", **fixed)
    before.pipeline.strategy.assignment.load_state(VIEW_COSTS)
    assert before.checkpoints.save(4)
    for method in ("splatfacto-pixel", "splatfacto-locality"):
        folder = tmp_path / method
        after = start(ALONE, tmp_path / "one", folder, 10, method=method, **fixed, load_dir=before.checkpoint_dir)
        assert not any(row in VIEW_COSTS for row in after.pipeline.strategy.assignment.state())


def test_a_resumed_run_says_what_it_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_clock", lambda _: Clock(1000, 4))
    monkeypatch.setattr(state, "_views", lambda _: 3)
    model = SimpleNamespace(total_points=1500, config=SimpleNamespace(optimizer_state="full"))
    model.densifier = SimpleNamespace(kind="default")
    made: Any = (None, World.single(), SimpleNamespace(model=model, datamanager=None), None)
    values = {"ranks": 4, "densifier": {"kind": "default"}, "views": 3}

    def report(values: dict[str, Any], batch: int) -> list[str]:
        opened: Any = SimpleNamespace(path="a.ckpt", values=values)
        return state.SplatState(*made)._report(opened, Clock(4000 // batch, batch))

    first, origin = report(values, 2)
    assert first == "Resuming at step 2,000 from a.ckpt: 4,000 images seen, 1,500 Gaussians, 2 images per step."
    assert origin == "It was written by 4 worker(s) with 4 images per step."
    assert report({**values, "ranks": 1}, 4) == [
        first.replace("2,000", "1,000").replace("2 images per", "4 images per")
    ]
    assert "written by nerfstudio's own trainer" in report({}, 1)[1]


def _tile(world: World, capture: Path, out: Path) -> dict[str, Any]:
    """Two workers that cut views into bands: stopped after five steps of a view, and not stopped."""
    common: dict[str, Any] = {"method": "splatfacto-tile", "keep_checkpoints": 0}
    whole = start(world, capture, out / "whole", 14, steps_per_save=4, **common)
    whole.train()
    load = whole.checkpoint_dir / "step-000000004.ckpt"
    resumed = start(world, capture, out / "resumed", 14, load_checkpoint=load, **common)
    known = len(resumed.pipeline.strategy.assignment.state())
    resumed.train()
    return {"differing": differing(everything(whole), everything(resumed)), "start": resumed._start_step,
            "known": known}  # fmt: skip


@pytest.mark.slow
def test_tile_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Views are of six rows of tiles, the lower ones empty: the assignment follows from their measured work."""
    write_capture(tmp_path / "capture", wide=False, taller=72)
    for report in run_ranks(_tile, 2, tmp_path / "capture", tmp_path):
        assert report == {"differing": [], "start": 5, "known": 5}
