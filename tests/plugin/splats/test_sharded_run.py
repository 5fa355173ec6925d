"""Runs whose points are spread over ranks: they stop, go on with other numbers of ranks, and nerfstudio loads them."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nerfstudio.scripts import exporter
from nerfstudio.utils.eval_utils import eval_setup

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import rows as checkpoint_rows
from ns_multigpu.plugin.checkpoint.verify import read_checkpoint_file, states_folder
from ns_multigpu.plugin.export.ply import export_ply, run_checkpoint
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.splat_model import SplatModel
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from tests.lib.ranks import run_ranks
from tests.lib.resuming import differing, part_of, whole, without_rates
from tests.lib.training_run import set_up, small_config, write_capture

Report = dict[str, Any]


def trainer_of(world: World, strategy: str, capture: Path, run: Path, **options: Any) -> DistributedTrainer:
    """Return a trainer that has been set up, for no steps, of one view a step."""
    config = small_config(capture, run)
    config.method_name, config.pipeline.strategy = f"splatfacto-{strategy}", strategy
    config.pipeline.views_per_step = 6
    config.max_num_iterations, config.max_num_images = 10, None
    config.pipeline.model.camera_optimizer.mode = "SO3xR3"
    for name, value in options.items():
        setattr(config, name, value)
    return set_up(world, config)


def trained(trainer: DistributedTrainer, world: World) -> None:
    """Put numbers of its own into everything that training would have changed."""
    g = torch.Generator().manual_seed(world.rank)
    for group, optimizer in trainer.optimizers.optimizers.items():
        seed = torch.Generator().manual_seed(9) if group == "camera_opt" else g
        for table in optimizer.param_groups:
            for param in table["params"]:
                param.data.add_(torch.rand(param.shape, generator=seed))
                state: Any = {name: torch.rand(param.shape, generator=seed) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[param] = {"step": torch.tensor(3.0), **state}
    model = trainer.pipeline.model
    for name in ("grad2d", "count"):
        model.densifier_state[name] = torch.rand(model.num_points, generator=g)


def models_of(run: Path, strategy: str = "tile") -> Path:
    return run / "run" / f"splatfacto-{strategy}" / "now" / "nerfstudio_models"


def _ranks(world: World, capture: Path, out: Path) -> Report:
    """Two ranks save; one goes on and saves; three go on from that and save; replicas go on, and back to shards."""
    checkpoint_rows.BLOCK = 11
    report: Report = {}
    expected: Any = None
    load: dict[str, Any] = {}
    for number, (size, strategy) in enumerate([(2, "tile"), (1, "tile"), (3, "tile"), (2, "batch"), (3, "tile")]):
        part = part_of(world, size)
        run = out / str(number)
        if part is not None:
            trainer = trainer_of(part, strategy, capture, run, **load)
            if number == 0:
                trained(trainer, part)
                expected = without_rates(whole(trainer, part))
            found = without_rates(whole(trainer, part))
            if strategy == "batch":
                for name in ("densifier/grad2d", "densifier/count"):
                    dist.all_reduce(found[name], group=part.group)
            if part.is_main:
                report[number] = (trainer._start_step, trainer.pipeline.model.num_points, differing(expected, found))
                report["total"] = trainer.pipeline.model.total_points
            assert trainer.checkpoints.save(4)
            trainer.config.save_config()
        dist.barrier(group=world.control)
        load = {"load_dir": models_of(run, strategy)}
    report["expected"] = expected
    return report


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    out = tmp_path_factory.mktemp("sharded")
    write_capture(out / "capture")
    return out, run_ranks(_ranks, 3, out / "capture", out)[0]


def ns_export(monkeypatch: pytest.MonkeyPatch, config: Path, folder: Path, *options: str) -> int | str | None:
    """Run the command in this process, and return its exit status, None where it just returns."""
    words = ["ns-export", "gaussian-splat", "--load-config", str(config), "--output-dir", str(folder), *options]
    monkeypatch.setattr(sys, "argv", words)
    try:
        exporter.entrypoint()
    except SystemExit as ended:
        return ended.code
    return None


pytestmark = pytest.mark.slow


def test_any_world_size_resumes(runs: tuple[Path, Report]) -> None:
    _, report = runs
    assert report["total"] == 60
    assert [report[n][0] for n in range(5)] == [0, 5, 5, 5, 5]
    assert [report[n][1] for n in range(5)] == [30, 60, 20, 60, 20]
    assert [report[n][2] for n in range(5)] == [[]] * 5


def test_nerfstudio_loads_it(runs: tuple[Path, Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ns-eval, ns-render, ns-viewer and ns-export do; also after the run was moved."""
    out, report = runs
    models = models_of(out / "2")
    pipeline = read_checkpoint_file(models / "step-000000004.ckpt")["pipeline"]
    assert not any("gauss_params" in key for key in pipeline)
    _, loaded, path, step = eval_setup(models.parent / "config.yml", test_mode="inference")
    assert (path, step) == (models / "step-000000004.ckpt", 4)
    expected = {name: value for name, value in report["expected"].items() if name.startswith("model/")}
    found = {f"model/{name}": value for name, value in loaded.model.named_parameters()}
    assert differing(expected, found) == [] and not loaded.model.sharded

    moved = tmp_path / "elsewhere"
    shutil.copytree(out / "2", moved)
    config = models_of(moved).parent / "config.yml"

    def now_there(settings: Any) -> Any:
        settings.output_dir = moved
        return settings

    _, loaded, path, _ = eval_setup(config, test_mode="inference", update_config_callback=now_there)
    assert path.is_relative_to(moved)
    assert torch.equal(loaded.model.means, expected["model/gauss_params.means"])
    kept, _ = export_ply(run_checkpoint(config, 4), tmp_path / "out.ply")
    assert 0 < kept <= 60

    (folder,) = states_folder(models_of(moved)).iterdir()
    shard = folder / "__2_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(InputError, match=r"__2_0[.]distcp has been truncated"):
        eval_setup(config, test_mode="inference", update_config_callback=now_there)
    shutil.rmtree(folder.parent)
    with pytest.raises(InputError, match=r"Gaussians .* are missing"):
        eval_setup(config, test_mode="inference", update_config_callback=now_there)


def test_ns_export_streams(runs: tuple[Path, Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = models_of(runs[0] / "2").parent / "config.yml"
    kept, _ = export_ply(run_checkpoint(config, None), tmp_path / "expected.ply")
    assert ns_export(monkeypatch, config, tmp_path / "rgb", "--ply-color-mode", "rgb") == 0
    header = (tmp_path / "rgb" / "splat.ply").read_bytes().split(b"end_header")[0]
    assert b"property uchar red" in header and f"element vertex {kept}".encode() in header

    def no_model(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was made")

    monkeypatch.setattr(SplatModel, "populate_modules", no_model)
    for _ in range(2):  # the second time over the first's file
        assert ns_export(monkeypatch, config, tmp_path / "ply", "--output-filename", "a.ply") == 0
        assert (tmp_path / "ply" / "a.ply").read_bytes() == (tmp_path / "expected.ply").read_bytes()
    with pytest.raises(AssertionError, match="the model was made"):  # a program of one's own gets what it asks for
        exporter.ExportGaussianSplat(load_config=config, output_dir=tmp_path).main()

    moved = tmp_path / "moved"
    shutil.copytree(models_of(runs[0] / "2").parent, moved)
    (folder,) = states_folder(moved / "nerfstudio_models").iterdir()
    shard = folder / "__2_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-3])
    status = ns_export(monkeypatch, moved / "config.yml", tmp_path / "bad")
    assert isinstance(status, str) and "__2_0.distcp has been truncated" in status
    assert not list((tmp_path / "bad").iterdir())
