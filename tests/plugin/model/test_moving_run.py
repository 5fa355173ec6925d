"""A run of 4D Gaussians on a capture in D-NeRF's layout: it trains alike on any number of ranks, its points spread
or not, goes on from its checkpoints, and renders each view at its time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.data.dataparsers.dnerf_dataparser import DNeRFDataParserConfig

from ns_multigpu.city import City, CityCapture, write_dnerf
from ns_multigpu.core.dist.collectives import all_gather_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import names
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.moving.schema import SCHEMA
from tests.lib.ranks import run_ranks
from tests.lib.training_run import follow

BLOCKS, VIEWS, SIZE = 1, 12, (40, 28)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a capture of six moments by two cameras, of which views 0, 5 and 10 are held out."""
    made = CityCapture(
        City(BLOCKS, 5, 3.0), views=VIEWS, width=SIZE[0], height=SIZE[1], samples=1, eval_interval=5,
        time_varying=True, rig=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("moving") / "city"
    write_dnerf(made, folder)
    return folder


def options(scene: Path, strategy: str, **more: Any) -> dict[str, Any]:
    model = {
        "primitive": "4dgs", "num_downscales": 0, "random_init": True, "num_random": 300, "random_scale": 2.0,
        "warmup_length": 4, "refine_every": 8, "densify_grad_thresh": 1e-5, "cull_alpha_thresh": 0.05,
        "sh_degree_interval": 8, "sh_degree": 1,
    }  # fmt: skip
    return {
        "pipeline.strategy": strategy, "pipeline.views_per_step": 2,
        "pipeline.datamanager.dataparser": DNeRFDataParserConfig(data=scene),
        **{f"pipeline.model.{name}": value for name, value in model.items()}, **more,
    }  # fmt: skip


def sums(trainer: Any, world: World) -> dict[str, torch.Tensor]:
    """Over the whole model's points, which are in another order where they are spread."""
    model = trainer.pipeline.model
    found = {name: value.detach() for name, value in model.gauss_params.items()}
    if model.sharded:
        found = {name: all_gather_rows(value, world)[0] for name, value in found.items()}
    return {name: torch.cat([value.new_tensor([len(value)]), value.sum(0).flatten()]) for name, value in found.items()}


def train_strategy(world: World, scene: Path, runs: Path, strategy: str) -> dict[str, torch.Tensor]:
    return sums(follow(world, scene, runs, options(scene, strategy), 14, 1), world)


def test_training_is_equal_on_any_number_of_ranks(scene: Path, tmp_path: Path) -> None:
    (expected,) = run_ranks(train_strategy, 1, scene, tmp_path / "one", "tile")
    assert set(expected) == set(names(SCHEMA)) and float(expected["means"][0]) > 320  # it has grown
    for found in run_ranks(train_strategy, 2, scene, tmp_path / "two", "tile"):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def train_fused(world: World, scene: Path, runs: Path, fused: str) -> list[dict[str, torch.Tensor]]:
    """Train with `tile` and `batch` in single precision, with an Adam eps far above rounding."""
    more = {"fused_steps": fused, **{f"optimizers.{name}.optimizer.eps": 1e-4 for name in names(SCHEMA)}}
    found = []
    for strategy in ("tile", "batch"):
        trainer = follow(world, scene, runs / strategy, options(scene, strategy, **more), 14, 1, double=False)
        found.append(sums(trainer, world))
    return found


def test_fused_steps_are_the_ordinary_ones(scene: Path, tmp_path: Path) -> None:
    (expected,) = run_ranks(train_fused, 1, scene, tmp_path / "one", "never")
    for ranks in (1, 2):
        for found in run_ranks(train_fused, ranks, scene, tmp_path / f"fused-{ranks}", "always"):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def train(world: World, scene: Path, runs: Path, saved: Path, strategy: str, steps: int, begun: Path | None) -> Any:
    """Train without densification, leaves a checkpoint, and renders held-out view 1 at several times."""
    more = {"pipeline.model.stop_split_at": 0, "load_dir": begun}
    trainer = follow(world, scene, runs, options(scene, strategy, **more), steps, 1, double=False)
    saved.mkdir(exist_ok=True)
    assert trainer.checkpoints.write(steps - 1, saved) == ""
    pipeline = trainer.pipeline
    assert pipeline.datamanager.includes_time  # nerfstudio's viewer shows its slider of time then
    camera = pipeline.datamanager.eval_dataset.cameras[1:2]
    pictures = []
    for time in (0.0, 1.0, 50.0):
        camera.times = torch.tensor([[time]])
        outputs = pipeline.renders.render(camera, roots=range(world.size))
        pictures.append(outputs["accumulation"].clone())
    return sums(trainer, world), trainer._start_step, pictures


def test_checkpoints_resume_on_other_world_sizes(scene: Path, tmp_path: Path) -> None:
    ((expected, start, pictures),) = run_ranks(train, 1, scene, tmp_path / "a", tmp_path / "whole", "batch", 8, None)
    assert start == 0 and float((pictures[0] - pictures[1]).abs().max()) > 0.003
    assert float(pictures[2].max()) < 1e-6 < float(pictures[0].max())  # nothing is there long after the capture
    run_ranks(train, 2, scene, tmp_path / "b", tmp_path / "half", "tile", 4, None)
    for strategy, ranks in (("tile", 1), ("batch", 2)):
        where = tmp_path / f"{strategy}"
        for found, start, seen in run_ranks(train, ranks, scene, where, where, strategy, 8, tmp_path / "half"):
            assert start == 4
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(seen, pictures, rtol=0, atol=2e-3)
    with pytest.raises(InputError, match=r"checkpoint of 4D Gaussians \(4dgs\).*run is of 3D Gaussians \(3dgs\)"):
        more = {"pipeline.model.primitive": "3dgs", "load_dir": tmp_path / "half"}
        follow(World.single(), scene, tmp_path / "c", options(scene, "batch", **more), 8, 1, double=False)
