"""Runs of `nerfacto-xl` on a small capture: resumed they are what was not stopped, on any number of workers."""

import copy
import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

from ns_multigpu.core.dist.world import World
from ns_multigpu.methods import nerfacto_xl
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from tests.lib.radiance_scene import GRIDS, SMALL
from tests.lib.ranks import run_ranks
from tests.lib.resuming import part_of
from tests.lib.training_run import TinyDataParserConfig

STEPS, SAVED, CELLS, RAYS = 16, 12, 3, 64


def configured(
    capture: Path, run: Path, *, points: bool = True, steps: int = 3, method: Any = nerfacto_xl.config, **options: Any
) -> Any:
    """Return the method's configuration, made small; options of the model."""
    config: Any = copy.deepcopy(method)
    config.machine.device_type, config.vis = "cpu", ""
    config.output_dir, config.timestamp, config.experiment_name = run, "now", "run"
    config.max_num_iterations, config.steps_per_checksum, config.steps_per_save = steps, 1, SAVED
    config.keep_checkpoints, config.logging.steps_per_log = 0, 1
    for group in config.optimizers.values():
        group["optimizer"].eps = 1e-7  # see `schedule`
    data = config.pipeline.datamanager
    parser = TinyDataParserConfig if points else NerfstudioDataParserConfig
    data.dataparser = parser(data=capture, downscale_factor=1, load_3D_points=False)
    data.train_num_rays_per_batch = data.eval_num_rays_per_batch = RAYS
    for name, value in {**SMALL, **GRIDS, "cells": CELLS, **options}.items():
        assert hasattr(config.pipeline.model, name), name
        setattr(config.pipeline.model, name, value)
    return config


def trained(world: World, config: Any, seed: int = 3) -> DistributedTrainer:
    """Return the trainer at the end of a run on these ranks."""
    torch.manual_seed(seed)
    World.from_env = staticmethod(lambda *_, **__: world)  # type: ignore[method-assign]
    config.get_base_dir().mkdir(parents=True, exist_ok=True)
    trainer = DistributedTrainer(config)
    try:
        trainer.setup()
        trainer.train()
    finally:
        set_world(None)
    return trainer


def everything(trainer: DistributedTrainer) -> dict[str, torch.Tensor]:
    """Parameters and moments of a rank, by name."""
    model = trainer.pipeline.model
    names = {id(p): name for name, p in model.named_parameters()}
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for group, optimizer in trainer.optimizers.optimizers.items():
        found[f"{group}/rate"] = torch.tensor(optimizer.param_groups[0]["lr"])
        for param, state in optimizer.state.items():
            found.update({f"{names[id(param)]}/{key}": value.clone() for key, value in state.items()})
    return found


def train_modes(world: World, capture: Path, out: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's final parameters of each run."""
    ends: dict[str, dict[str, torch.Tensor]] = {}
    for name, size, begun in (
        ("three", 3, ""), ("alone", 1, ""), ("three again", 3, "three"), ("two", 2, "three"), ("one", 1, "three"),
    ):  # fmt: skip
        part = part_of(world, size) if size > 1 else (World.single() if world.is_main else None)
        if part is not None:
            config = configured(capture, out / name, steps=STEPS)
            if begun:
                config.load_dir, config.load_step = out / begun / "run/nerfacto-xl/now/nerfstudio_models", SAVED
            # Proposals learn in every fourth step from the tenth on: the first is that after the save.
            config.pipeline.model.proposal_warmup, config.pipeline.model.proposal_update_every = 5, 3
            ends[name] = everything(trained(part, config, seed=4 if begun else 3))
        dist.barrier(group=world.control)
    return ends


def near(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors of `a` that differ from those of `b`."""
    return [name for name, value in a.items() if not torch.allclose(value, b[name], rtol=5e-3, atol=2e-3)]


@pytest.mark.slow
def test_runs_and_resumed_runs(capture: Path, tmp_path: Path) -> None:
    ends = run_ranks(train_modes, 3, capture, tmp_path)
    whole = ends[0]["alone"]
    assert sum(".field." in name for name in whole) > 10 and len({n[:7] for n in whole if n.startswith("cells.")}) == 3
    for rank, end in enumerate(ends):
        again, three = end["three again"], end["three"]
        assert again.keys() == three.keys()
        assert [name for name in three if not torch.equal(again[name], three[name])] == [], f"rank {rank}, resumed"
        assert near(three, whole) == [], f"rank {rank} of three, and one rank"
        for name in ("two", "one"):
            if name in end:
                assert near(end[name], whole) == [], f"{name}, resumed from three"
    assert len(ends[1]["two"]) > len(ends[1]["three"]), "two of three cells are on the second of two ranks"
    rows = [
        [json.loads(line) for line in (tmp_path / name / "run/nerfacto-xl/now/metrics.jsonl").read_text().splitlines()]
        for name in ("three", "alone")
    ]
    for three, alone in zip(*rows, strict=True):
        assert three["loss"] == pytest.approx(alone["loss"], rel=5e-3)
        assert sum(three["samples_by_rank"]) == alone["samples_by_rank"][0]
        assert three["segments_a_ray"] == alone["segments_a_ray"] > 1.2 and three["rays_outside"] == 0
        assert three["bytes_a_ray"] == pytest.approx(three["segments_a_ray"] * 11 * 4)
    drift = max(float((value - whole[name]).abs().max()) for name, value in ends[0]["three"].items() if value.numel())
    assert drift < 2e-2 < float(whole["shared.mlp_head.layers.0.weight"].abs().max())
    for name in ("three", "alone"):
        assert (tmp_path / name / "run/nerfacto-xl/now/partition.png").stat().st_size > 1000


def opened(config: Any) -> tuple[Any, Any, Path]:
    """Return a trained run's pipeline as nerfstudio's commands load it, its state, and the state's file."""
    config.load_dir = config.get_checkpoint_dir()
    loaded = config.pipeline.setup(device="cpu", test_mode="test")
    loaded.eval()
    file = config.load_dir / "step-000000002.ckpt"
    state = torch.load(file, map_location="cpu")
    loaded.load_pipeline(state["pipeline"], state["step"])
    return loaded, state, file


def resumed_from_the_middle(
    world: World, makers: Mapping[str, Callable[[Path], Any]], out: Path
) -> dict[str, tuple[dict[str, torch.Tensor], ...]]:
    """Return by way all that a run of 8 steps on these ranks ends with, and on rank 0 one that goes on from its middle
    on one rank. `makers` make the way's configuration, given a folder."""
    ends: dict[str, tuple[dict[str, torch.Tensor], ...]] = {}
    for way, make in makers.items():
        config = make(out / way)
        config.steps_per_save, config.save_only_latest_checkpoint = 4, False
        found = [everything(trained(world, config))]
        if world.is_main:
            models, config = config.get_checkpoint_dir(), make(out / f"{way} again")
            config.load_dir, config.load_step = models, 4
            found.append(everything(trained(World.single(), config, seed=9)))
        ends[way] = tuple(found)
        dist.barrier(group=world.control)
    return ends


@pytest.mark.parametrize(
    ("spread", "sampling"),
    [("xl", "proposals"), ("ddp", "proposals"), ("xl", "occupancy")],
)
def test_evaluation_in_one_process_shows_what_was_trained(
    capture: Path, tmp_path: Path, spread: str, sampling: str
) -> None:
    trainer = trained(World.single(), configured(capture, tmp_path, spread=spread, sampling=sampling))
    pipeline = trainer.pipeline
    expected = pipeline.get_average_eval_image_metrics()
    loaded, state, file = opened(configured(capture, tmp_path, spread=spread, sampling=sampling))
    assert not any(module.training for module in loaded.modules()), "new cells, too, are there to be looked at"
    found = loaded.get_average_eval_image_metrics(output_path=tmp_path / "images", get_std=True)
    assert found["psnr"] == expected["psnr"] and found["ssim"] == expected["ssim"]
    assert {path.name for path in (tmp_path / "images").iterdir()} == {
        "eval_img_0000.png", "eval_accumulation_0000.png", "eval_depth_0000.png"
    }  # fmt: skip
    _, metrics, images = (None, *loaded.get_eval_image_metrics_and_images(0))
    assert metrics["num_rays"] == 28 * 24 and images["img"].shape[:2] == (24, 56)
    first, again = (pipeline.datamanager.next_train(9)[1]["indices"] for _ in range(2))
    assert torch.equal(first, again), "a step's rays follow from its number"
    assert not torch.equal(first, pipeline.datamanager.next_train(10)[1]["indices"])
    # A file of the cells that is cut short is named.
    folder = next(file.parent.with_name("nerfstudio_models_state").glob("step-000000002*"))
    part = next(folder.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(InputError, match="truncated"):
        loaded.load_pipeline(state["pipeline"], state["step"])


def _train_all_modes(world: World, capture: Path, out: Path) -> dict[str, tuple[dict[str, torch.Tensor], ...]]:
    """Of each way: a run of two ranks, one that goes on from its middle on one rank, and what that was before."""
    makers = dict[str, Callable[[Path], Any]]()
    for way in ("ddp", "xl occupancy", "ddp occupancy", "xl sky", "xl density"):
        spread, *more = way.split()
        options = {"spread": spread, "sampling": "occupancy" if more == ["occupancy"] else "proposals"}
        options |= {"background_color": "sky"} if more == ["sky"] else {}
        options |= {"density": "cell"} if more == ["density"] else {}
        makers[way] = partial(configured, capture, steps=8, **options)
    return resumed_from_the_middle(world, makers, out)


def test_all_modes_resume_with_other_world_sizes(capture: Path, tmp_path: Path) -> None:
    ends = run_ranks(_train_all_modes, 2, capture, tmp_path)
    for spread, (two, again) in ends[0].items():
        assert near(two, again) == [], spread
        theirs = ends[1][spread][0]
        assert near(theirs, again) == [], spread
        learns = any(name.startswith("sky.") and name.endswith("/exp_avg") for name in two)
        assert learns == (spread == "xl sky"), spread
        fields = {name[:8] for name in two if name.startswith("cells.")}
        assert fields == {"cells.0."}, f"{spread}: rank 0 of two has one of three fields, or the one that there is"
        assert {name[:8] for name in again if name.startswith("cells.")} == (
            {"cells.0."} if spread.startswith("ddp") else {f"cells.{c}." for c in range(3)}
        )


def _looked_at(world: World, capture: Path, out: Path) -> list[Any]:
    """Images that a thread of rank 0 has asked for while two ranks trained, and what all ranks see after training."""
    config = configured(capture, out, steps=6)
    asked: list[Any] = []
    threads: list[threading.Thread] = []
    started = DistributedTrainer._train

    def train(trainer: DistributedTrainer) -> None:
        def look() -> None:  # as nerfstudio's viewer
            for _ in range(2):
                with trainer.train_lock, torch.no_grad():
                    step = trainer.step
                    asked.append((step, trainer.pipeline.model.get_outputs_for_camera(camera)))

        camera = trainer.pipeline.datamanager.eval_dataset.cameras[0:1]
        if world.is_main:
            threads.append(threading.Thread(target=look))
            threads[0].start()
        started(trainer)

    DistributedTrainer._train = train  # type: ignore[method-assign]
    trainer = trained(world, config)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    model = trainer.pipeline.model
    model.eval()
    with torch.no_grad():
        end = model.get_outputs_for_camera(trainer.pipeline.datamanager.eval_dataset.cameras[0:1])
    return [asked, {name: value.clone() for name, value in end.items()}, everything(trainer)]


def _in_half(world: World, capture: Path, out: Path) -> dict[str, torch.Tensor]:
    config = configured(capture, out, steps=6)
    config.mixed_precision = True
    return everything(trained(world, config))


def test_networks_in_bfloat16(capture: Path, tmp_path: Path) -> None:
    """Near what single precision comes to, and not the same; parameters stay in single precision."""
    half, single = (
        _in_half(World.single(), capture, tmp_path / "half"),
        everything(trained(World.single(), configured(capture, tmp_path / "single", steps=6))),
    )
    weight = "shared.mlp_head.layers.0.weight"
    assert all(value.dtype != torch.bfloat16 for value in half.values())
    assert not torch.equal(half[weight], single[weight])
    assert float((half[weight] - single[weight]).norm()) < 0.1 * float(single[weight].norm())
    for found in run_ranks(_in_half, 2, capture, tmp_path / "two"):
        assert all(name in half for name in found)
        assert float((found[weight] - half[weight]).abs().max()) < 2e-2


def test_viewer_renders_while_two_ranks_train(capture: Path, tmp_path: Path) -> None:
    (asked, end, one), (none, same, _) = run_ranks(_looked_at, 2, capture, tmp_path)
    assert len(asked) == 2 and none == []
    for _, seen in asked:
        assert seen.keys() == end.keys() and seen["rgb"].shape == end["rgb"].shape == (24, 28, 3)
    assert torch.equal(end["rgb"], same["rgb"]) and not torch.equal(asked[0][1]["rgb"], end["rgb"])
    # Who looks changes nothing.
    alone = everything(trained(World.single(), configured(capture, tmp_path / "alone", steps=6)))
    assert near(one, alone) == []


def test_bad_options_are_named(capture: Path, tmp_path: Path) -> None:
    config = configured(capture, tmp_path, spread="mega")
    with pytest.raises(InputError, match="spread mega: it is a baseline of the repository's benchmarks/baselines"):
        config.pipeline.setup(device="cpu", test_mode="val")
    config = configured(capture, tmp_path, cells=-1)
    with pytest.raises(InputError, match="cells -1"):
        config.check_method()


def test_without_points_space_is_cut_along_rays(
    capture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = configured(capture, tmp_path, points=False, cells=2)
    torch.manual_seed(3)
    pipeline = config.pipeline.setup(device="cpu", test_mode="val")
    assert "samples along training rays" in capfd.readouterr().out
    held = torch.bincount(pipeline.model.partition.of(pipeline.cut_by))
    assert held.tolist() == pytest.approx([len(pipeline.cut_by) / 2] * 2, rel=0.01)


def test_more_cells_than_points(capture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = configured(capture, tmp_path, cells=64)
    pipeline = config.pipeline.setup(device="cpu", test_mode="val")
    said = capfd.readouterr().out
    assert (
        "of 64 cells have none of the 60 points" in said and "8 training views for 64 cells. Below 75 per cell" in said
    )
    assert len(pipeline.model.cells) == 64


def test_one_field_needs_no_more_views(capture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configured(capture, tmp_path, cells=4, spread="ddp").pipeline.setup(device="cpu", test_mode="val")
    assert "training views for" not in capfd.readouterr().out


def test_rays_that_miss_all_cells(capture: Path, tmp_path: Path) -> None:
    config = configured(capture, tmp_path, disable_scene_contraction=True, near_plane=90.0)
    with pytest.raises(InputError, match="No ray of step 0 meets a cell"):
        trained(World.single(), config)


def test_checkpoints_that_do_not_fit_are_named(capture: Path, tmp_path: Path) -> None:
    trained(World.single(), configured(capture, tmp_path / "a", cells=2))
    models = tmp_path / "a/run/nerfacto-xl/now/nerfstudio_models"
    config = configured(capture, tmp_path / "b", cells=2, hidden_dim=8)
    config.load_dir = models
    with pytest.raises(InputError, match=r"does not fit this model: shared\.density"):
        trained(World.single(), config)
    config = configured(capture, tmp_path / "e", cells=2, density="cell")
    config.load_dir = models
    with pytest.raises(InputError, match=r"density shared, and this has cell\. Give shared"):
        trained(World.single(), config)
    config = configured(capture, tmp_path / "c", cells=4)
    config.load_dir = models
    with pytest.raises(InputError, match=r"cells 4: .* has 2, and a run keeps its cells"):
        trained(World.single(), config)
    config = configured(capture, tmp_path / "d", cells=0)
    config.load_dir = models
    assert all("has 2 cells, and each of the 3 workers" in said for said in run_ranks(_refused, 3, config))


def _refused(world: World, config: Any) -> str:
    with pytest.raises(InputError) as caught:
        trained(world, config)
    return str(caught.value)
