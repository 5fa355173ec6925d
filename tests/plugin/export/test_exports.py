"""Boxes, plain colours and .splat files, streamed; and what other programs read in them."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import plyfile
import pytest
import torch
from nerfstudio.data.scene_box import OrientedBox

from ns_multigpu.plugin.export import ns_export
from ns_multigpu.plugin.export.ply import export_ply
from ns_multigpu.plugin.export.splat import RECORD, export_splat
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.cameras import in_box
from ns_multigpu.primitives.gaussians.init import SH_C0
from tests.plugin.export.test_ply_export import as_nerfstudio_does, exported, ordinary, points, sharded

BOX: Any = ((0.2, 0.0, -0.1), (0.1, 0.2, 0.3), (2.0, 2.5, 1.5))
BOX_OPTIONS = dict(zip(("obb_center", "obb_rotation", "obb_scale"), BOX, strict=True))


@pytest.mark.parametrize("written", [ordinary, sharded])
@pytest.mark.parametrize("rgb", [False, True])
@pytest.mark.parametrize("boxed", [False, True])
def test_the_same_bytes_as_nerfstudios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Any, rgb: bool, boxed: bool
) -> None:
    params = points(200, degree=3)
    options = {"ply_color_mode": "rgb"} if rgb else {}
    expected = as_nerfstudio_does(params, tmp_path, monkeypatch, **options, **(BOX_OPTIONS if boxed else {}))
    path = written(tmp_path / "nerfstudio_models", params)
    crop = OrientedBox.from_params(*BOX) if boxed else None
    for chunk in (1000, 37):
        output = tmp_path / "out" / f"{chunk}.ply"
        kept, total = export_ply(path, output, chunk=chunk, crop=crop, rgb=rgb)
        assert output.read_bytes() == expected
        assert total == 200 and (5 < kept < 60 if boxed else 140 < kept < 200)
        assert [file.name for file in output.parent.iterdir() if "part" in file.name] == []


@pytest.mark.filterwarnings("error")
def test_points_in_a_box_are_nerfstudios() -> None:
    box, where = OrientedBox.from_params(*BOX), points(2000, degree=0)["means"]
    with pytest.warns(UserWarning, match="copy construct"):
        expected = box.within(where)
    assert torch.equal(in_box(box, where), expected) and 0 < int(expected.sum()) < 2000


def test_plain_colours_of_a_model_without_harmonics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = points(40, degree=0)
    expected = as_nerfstudio_does(params, tmp_path, monkeypatch, ply_color_mode="rgb")
    assert export_ply(ordinary(tmp_path / "m", params), tmp_path / "a.ply", rgb=True)[0] > 20
    assert (tmp_path / "a.ply").read_bytes() == expected


def test_another_program_reads_the_ply(tmp_path: Path) -> None:
    """plyfile, by the names that viewers go by; harmonics channel after channel, as Inria's code reads them."""
    params = points(60, degree=2)
    kept, _ = export_ply(sharded(tmp_path / "m", params), tmp_path / "a.ply")
    vertex = plyfile.PlyData.read(str(tmp_path / "a.ply"))["vertex"]
    seen = params["opacities"][:, 0] >= -5.5373
    assert vertex.count == kept == int(seen.sum())
    columns = {
        "means": ["x", "y", "z"], "scales": [f"scale_{k}" for k in range(3)], "quats": [f"rot_{k}" for k in range(4)],
        "features_dc": [f"f_dc_{k}" for k in range(3)], "opacities": ["opacity"],
    }  # fmt: skip
    for name, of_file in columns.items():
        np.testing.assert_array_equal(np.stack([vertex[c] for c in of_file], -1), params[name][seen].numpy())
    rest = np.stack([vertex[f"f_rest_{k}"] for k in range(24)], -1).reshape(kept, 3, 8).transpose(0, 2, 1)
    np.testing.assert_array_equal(rest, params["features_rest"][seen].numpy())


@pytest.mark.parametrize("written", [ordinary, sharded])
def test_a_splat_file(tmp_path: Path, written: Any) -> None:
    params = points(90, degree=2)
    params["means"][7, 1] = float("nan")
    path = written(tmp_path / "m", params)
    for chunk in (1000, 13):
        kept, total = export_splat(path, tmp_path / "a.splat", chunk=chunk, overwrite=True)
        data = (tmp_path / "a.splat").read_bytes()
        assert total == 90 and len(data) == 32 * kept
        seen = params["opacities"][:, 0] >= -5.5373
        seen[7] = False
        assert kept == int(seen.sum())
        # By place, as the format's description has it, and not by the names in our own code.
        floats = np.frombuffer(data, "<f4").reshape(-1, 8)[:, :6]
        small = np.frombuffer(data, "u1").reshape(-1, 32)[:, 24:]
        np.testing.assert_array_equal(floats[:, :3], params["means"][seen].numpy())
        np.testing.assert_allclose(floats[:, 3:], params["scales"][seen].exp().numpy(), rtol=1e-6)
        colors = (params["features_dc"][seen] * SH_C0 + 0.5).clamp(0, 1).numpy()
        assert np.abs(small[:, :3] / 255 - colors).max() < 0.6 / 255
        assert np.abs(small[:, 3] / 255 - params["opacities"][seen][:, 0].sigmoid().numpy()).max() < 0.6 / 255
        turned = (small[:, 4:].astype(float) - 128) / 128
        exact = torch.nn.functional.normalize(params["quats"][seen], dim=-1).numpy()
        assert np.abs(turned - exact).max() < 1.1 / 128 and RECORD.itemsize == 32
    crop = OrientedBox.from_params(*BOX)
    assert 2 < export_splat(path, tmp_path / "b.splat", crop=crop)[0] < 40
    assert [file.name for file in tmp_path.glob("*part*")] == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ordinary(tmp_path / "nerfstudio_models", points(60))
    config = tmp_path / "config.yml"
    config.write_text("of a run")
    run = partial(exported, capsys, config)
    box = ("--obb-center", "0", "0", "0", "--obb-rotation", "0", "0", "0", "--obb-scale", "2", "2", "2")
    assert "or outside the box" in run("a.splat", *box) and "that are transparent or not finite)" in run(
        "a.ply", "--color", "rgb"
    )
    assert b"property uchar red" in (tmp_path / "a.ply").read_bytes()[:600]
    assert "give the name of a .ply, .splat, .spz or .sog file, or lod-meta.json" in run("a.ksplat")
    assert "a .splat file has plain colours in any case" in run("b.splat", "--color", "rgb")
    assert "A box takes all three" in run("b.ply", "--obb-center", "0", "0", "0")
    for words in (("2", "2", "0"), ("2", "-1", "2"), ("2", "nan", "2")):
        flat = run("b.ply", *box[:-3], *words)
        assert f"--obb-scale {' '.join(words)} holds nothing: give numbers, and sizes above 0" in flat
    assert "--obb-rotation 0 0 90: give radians" in run("b.ply", *box[:7], "90", *box[8:])
    assert "exists already" in run("a.splat") and "exists already" in run("a.ply")
    nowhere = ("--obb-center", "90", "0", "0", *box[4:])
    assert "the box holds none of its" in run("c.splat", *nowhere) == run("c.splat", *nowhere)
    assert "the box holds none of its" in run("c.ply", *nowhere) and not (tmp_path / "c.ply").exists()
    with pytest.raises(InputError):
        export_splat(tmp_path / "none.ckpt", tmp_path / "d.splat")


class ExportGaussianSplat(SimpleNamespace):
    """Options of nerfstudio's exporter of this name."""


@pytest.mark.parametrize("boxed", [True, False])
def test_ns_export_hands_its_box_and_its_colours_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], boxed: bool
) -> None:
    asked: dict[str, Any] = {}
    box = BOX_OPTIONS if boxed else dict.fromkeys(BOX_OPTIONS)
    exporter = ExportGaussianSplat(
        output_dir=tmp_path, output_filename="a.ply", load_config=tmp_path, ply_color_mode="rgb", **box
    )
    monkeypatch.setattr(ns_export, "running_command", lambda _: (exporter, None))
    monkeypatch.setattr(ns_export, "run_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(ns_export, "export_ply", lambda *_, **options: (asked.update(options), (5, 9))[1])
    with pytest.raises(SystemExit) as ended:
        ns_export.stream_for_ns_export()
    assert ended.value.code == 0 and asked["rgb"] and asked["overwrite"]
    assert ("or outside the box" in capsys.readouterr().out) == boxed
    crop, expected = asked["crop"], OrientedBox.from_params(*BOX)
    assert crop is None if not boxed else torch.equal(crop.T, expected.T) and torch.equal(crop.S, expected.S)
    exporter.obb_center, exporter.obb_scale = BOX[0], None
    with pytest.raises(SystemExit, match="ns-export: A box takes all three"):
        ns_export.stream_for_ns_export()
