"""The streamed PLY against the one that nerfstudio's exporter writes, byte for byte."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.models.splatfacto import SplatfactoModel
from nerfstudio.scripts import exporter
from torch import Tensor

from ns_multigpu import cli
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import rows as checkpoint_rows
from ns_multigpu.plugin.checkpoint.atomic_save import save
from ns_multigpu.plugin.checkpoint.sharded_state import split_state, without_points
from ns_multigpu.plugin.checkpoint.verify import states_folder
from ns_multigpu.plugin.export import ply as ply_export
from ns_multigpu.plugin.export.ply import export_ply, run_checkpoint
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.gaussians.schema import SCHEMA
from tests.lib.saving import files_of

ALONE = World.single()


def points(count: int = 50, degree: int = 2) -> dict[str, Tensor]:
    """Return some Gaussians, a few of them all but transparent."""
    g = torch.Generator().manual_seed(count)
    params = {one.name: torch.randn(count, *one.sized(degree), generator=g) for one in SCHEMA}
    params["opacities"] = params["opacities"] * 3 - 2
    params["opacities"][:3, 0] = torch.tensor([-5.5373, -5.5374, -5.5372])  # at the limit
    return params


def as_nerfstudio_does(
    params: dict[str, Tensor], folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> bytes:
    model = SplatfactoModel.__new__(SplatfactoModel)
    torch.nn.Module.__init__(model)
    model.gauss_params = torch.nn.ParameterDict({name: torch.nn.Parameter(value) for name, value in params.items()})
    model.config = SimpleNamespace(sh_degree=params["features_rest"].shape[1])  # type: ignore[assignment]
    monkeypatch.setattr(exporter, "eval_setup", lambda *_, **__: (None, SimpleNamespace(model=model), None, 0))
    exporter.ExportGaussianSplat(load_config=Path("config.yml"), output_dir=folder, **options).main()
    return (folder / "splat.ply").read_bytes()


def exported(capsys: pytest.CaptureFixture[str], config: Path, output: str, *words: str) -> str:
    """Run `ns-multigpu export` into a file next to the configuration; return what it says, or why it fails."""
    try:
        cli.main(["export", "--load-config", str(config), "--output-path", str(config.with_name(output)), *words])
    except SystemExit:
        return capsys.readouterr().err
    return capsys.readouterr().out


def ordinary(models: Path, params: dict[str, Tensor], step: int = 1, prefix: str = "_model.gauss_params.") -> Path:
    """Return a .ckpt with the points in it, as nerfstudio's trainer writes it."""
    models.mkdir(parents=True, exist_ok=True)
    path = models / f"step-{step:09d}.ckpt"
    pipeline = {f"{prefix}{name}": value for name, value in params.items()}
    torch.save({"step": step, "pipeline": pipeline, "optimizers": {}}, path)
    return path


def sharded(models: Path, params: dict[str, Tensor], step: int = 1) -> Path:
    """Return a .ckpt whose points are in shards, in blocks of 7 rows."""
    tensors, marker = split_state({}, params, ALONE)
    block, checkpoint_rows.BLOCK = checkpoint_rows.BLOCK, 7
    assert save(models, step, lambda: without_points({}, marker), tensors, {}, ALONE) == ""
    checkpoint_rows.BLOCK = block
    return models / f"step-{step:09d}.ckpt"


def test_without_harmonics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours to the rounding of torch's sigmoid, all else the same bytes."""
    params = points(degree=0)
    expected = as_nerfstudio_does(params, tmp_path, monkeypatch)
    kept, _ = export_ply(sharded(tmp_path / "nerfstudio_models", params), tmp_path / "out.ply", chunk=11)
    data = (tmp_path / "out.ply").read_bytes()
    begin = data.index(b"end_header\n") + len(b"end_header\n")
    assert data[:begin] == expected[:begin] and b"f_rest" not in data[:begin]
    ours, theirs = (np.frombuffer(x[begin:], "<f4").reshape(kept, -1) for x in (data, expected))
    np.testing.assert_allclose(ours[:, 6:9], theirs[:, 6:9], rtol=1e-6, atol=1e-6)
    assert (np.delete(ours, [6, 7, 8], axis=1) == np.delete(theirs, [6, 7, 8], axis=1)).all()


@pytest.mark.parametrize("name", ["scales", "quats", "opacities", "features_rest"])
@pytest.mark.parametrize("count", [50, 103])
def test_without_numbers_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    """103 becomes a number of two digits: the header gets shorter than it was thought."""
    params = points(count)
    params["opacities"][:] = 1
    params[name][10:14].view(4, -1)[:, -1] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    expected = as_nerfstudio_does(params, tmp_path, monkeypatch)
    output = tmp_path / "out.ply"
    assert export_ply(sharded(tmp_path / "nerfstudio_models", params), output, chunk=20) == (count - 4, count)
    assert output.read_bytes() == expected


def test_a_position_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nerfstudio's exporter fails; the others of the points are the same as without it."""
    params = points()
    params["means"][20, 1] = torch.nan
    path = ordinary(tmp_path / "nerfstudio_models", params)
    with pytest.raises(ValueError, match="not empty"):
        as_nerfstudio_does(params, tmp_path, monkeypatch)
    export_ply(path, tmp_path / "out.ply")
    others = {name: torch.cat([value[:20], value[21:]]) for name, value in params.items()}
    assert (tmp_path / "out.ply").read_bytes() == as_nerfstudio_does(others, tmp_path, monkeypatch)


@pytest.mark.parametrize("prefix", ["_model.", "module._model.gauss_params.", "_model.module.gauss_params."])
def test_nerfstudios_other_names(tmp_path: Path, prefix: str) -> None:
    now = ordinary(tmp_path / "now", points())
    export_ply(now, tmp_path / "now.ply")
    export_ply(ordinary(tmp_path / "then", points(), prefix=prefix), tmp_path / "then.ply")
    assert (tmp_path / "then.ply").read_bytes() == (tmp_path / "now.ply").read_bytes()


def test_one_chunk_is_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sharded(tmp_path / "nerfstudio_models", points(100))
    held: list[int] = []
    original = ply_export.SavedPoints.read

    def read(self: Any, names: Any, rows: range, **kwargs: Any) -> Any:
        held.append(len(rows))
        return original(self, names, rows, **kwargs)

    monkeypatch.setattr(ply_export.SavedPoints, "read", read)
    steps: list[int] = []

    def progress(chunks: Any, total: int) -> Any:
        assert total == 4
        for begin in chunks:
            yield begin
            steps.append(begin)

    export_ply(path, tmp_path / "out.ply", chunk=30, progress=progress)
    assert held == [30, 30, 30, 10] * 2 and steps == [0, 30, 60, 90]


def test_refused(tmp_path: Path) -> None:
    path, output = sharded(tmp_path / "nerfstudio_models", points()), tmp_path / "out.ply"
    output.write_text("kept")
    with pytest.raises(InputError, match=r"out[.]ply exists already.*--overwrite"):
        export_ply(path, output)
    assert output.read_text() == "kept"
    shard = next(file for file in files_of(path.parent, 1) if file.suffix == ".distcp")
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"distcp has been truncated"):
        export_ply(path, output, overwrite=True)
    faint = points() | {"opacities": torch.full((50, 1), -9.0)}
    with pytest.raises(InputError, match="none of its 50 Gaussians"):
        export_ply(ordinary(tmp_path / "faint", faint), output, overwrite=True)
    assert output.read_text() == "kept" and not list(tmp_path.glob("*.part*"))
    with pytest.raises(InputError, match=r"not a checkpoint of 3D Gaussians: it has no means"):
        export_ply(ordinary(tmp_path / "nerf", {"field": torch.ones(3)}), output, overwrite=True)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "moved" / "here"
    output = run / "out.ply"
    for step in (5, 12):
        sharded(run / "nerfstudio_models", points(40 + step), step)
    config = run / "config.yml"
    config.write_text("of a run that was moved")
    export = partial(exported, capsys, config, "out.ply")
    assert "left out" in export()
    first = output.read_bytes()
    assert "exists already" in export("--step", "5") and output.read_bytes() == first
    assert "Gaussians of step-" in export("--step", "5", "--overwrite") and output.read_bytes() != first
    with pytest.raises(InputError, match=r"no such step; there are 5, 12"):
        run_checkpoint(config, 7)
    for wrong, why in ((run / "nothing.yml", "there is no such file"), (run, "it is a folder")):
        with pytest.raises(InputError, match=why):
            run_checkpoint(wrong, None)
    with pytest.raises(InputError, match=r"/proc/x.ply cannot be written: .*Choose another place"):
        export_ply(run_checkpoint(config, 5), Path("/proc/x.ply"))
    with pytest.raises(InputError, match=r"this is not the config.yml of a run"):
        run_checkpoint(next((run / "nerfstudio_models").glob("*.ckpt")), None)
    states_folder(run / "nerfstudio_models").rename(tmp_path / "lost")
    assert "Move or copy a run with its whole folder" in export("--overwrite")
