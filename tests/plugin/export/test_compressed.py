""".spz, .sog and levels of detail, opened by readers that are written from the formats' descriptions."""

import gzip
import io
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.scene_box import OrientedBox
from PIL import Image
from scipy.spatial import KDTree

from ns_multigpu.plugin.export import compressed
from ns_multigpu.plugin.export.compressed import LEVELS, PROGRAM, export_compressed
from ns_multigpu.plugin.export.ply import export_ply, visible
from ns_multigpu.plugin.faults.errors import InputError
from tests.plugin.export.test_exports import BOX
from tests.plugin.export.test_ply_export import exported, ordinary, points, sharded

COUNT = 400
with_program = pytest.mark.skipif(
    shutil.which(PROGRAM) is None, reason=f"needs {PROGRAM}: npm install -g @playcanvas/splat-transform"
)


def read_spz(path: Path) -> dict[str, np.ndarray]:
    """Return some parameters of a file of version 3 (github.com/nianticlabs/spz), in the axes of a PLY."""
    data = gzip.decompress(path.read_bytes())
    magic, version, count, degree, bits, _ = struct.unpack_from("<IIIBBB", data)
    assert (magic, version, degree) == (0x5053474E, 3, 2)
    at, parts = 16, []
    for width in (9, 1, 3, 3, 4, 24):
        parts.append(np.frombuffer(data, np.uint8, count * width, at).reshape(count, width))
        at += count * width
    assert at == len(data)
    low, middle, high = parts[0].reshape(count, 3, 3).astype(np.int32).transpose(2, 0, 1)
    fixed = low | middle << 8 | (high ^ 0x80) - 0x80 << 16
    return {
        "means": fixed / 2**bits,
        "opacities": parts[1] / 255,
        "features_dc": (parts[2] / 255 - 0.5) / 0.15,
        "scales": parts[3] / 16 - 10,
    }


def read_sog(read: Callable[[str], bytes]) -> dict[str, Any]:
    """Return the points of SOG's version 2 (developer.playcanvas.com, "The SOG format"), in the axes of a PLY.

    Args:
        read: returns the content of a file of the format, by name.
    """
    meta = json.loads(read("meta.json"))

    def texels(part: str, image: int = 0) -> "np.ndarray[Any, Any]":
        with Image.open(io.BytesIO(read(meta[part]["files"][image]))) as opened:
            return np.array(opened.convert("RGBA")).reshape(-1, 4)[: meta["count"] if part != "shN" or image else None]

    assert meta["version"] == 2
    low, high = (np.array(meta["means"][name]) for name in ("mins", "maxs"))
    fixed = texels("means")[:, :3] + texels("means", 1)[:, :3].astype(int) * 256
    logs = low + (high - low) * fixed / 65535
    colors, scales = (np.array(meta[part]["codebook"])[texels(part)[:, :3]] for part in ("sh0", "scales"))
    small = texels("quats").astype(float)
    others = (small[:, :3] / 255 - 0.5) * 2**0.5
    quats = np.array([
        np.insert(row, int(largest) - 252, max(0, 1 - row @ row) ** 0.5)
        for row, largest in zip(others, small[:, 3], strict=True)
    ])  # fmt: skip
    found = {
        "means": np.sign(logs) * np.expm1(np.abs(logs)), "opacities": texels("sh0")[:, 3:] / 255, "quats": quats,
        "features_dc": colors, "scales": scales,
    }  # fmt: skip
    if "shN" in meta:
        size = (3, 8, 15)[meta["shN"]["bands"] - 1]
        palette = np.array(meta["shN"]["codebook"])[texels("shN")[:, :3]].reshape(-1, size, 3)
        labels = texels("shN", 1).astype(int)
        found["features_rest"] = palette[labels[:, 0] + labels[:, 1] * 256]
    return found


def kept(params: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the points that an export writes."""
    params = params or points(COUNT)
    seen = visible(params, None)
    return {name: value[seen].numpy() for name, value in params.items()}


@with_program
def test_spz(tmp_path: Path) -> None:
    written = export_compressed(sharded(tmp_path / "nerfstudio_models", points(COUNT)), tmp_path / "out" / "model.spz")
    expected, found = kept(), read_spz(tmp_path / "out" / "model.spz")
    assert written == (len(expected["means"]), COUNT) and len(found["means"]) == written[0]
    order = KDTree(found["means"]).query(expected["means"])[1]
    assert len(set(order)) == len(order)
    opacities = torch.sigmoid(torch.from_numpy(expected["opacities"])).numpy()
    for name, value, step in [
        ("means", expected["means"], 2**-12), ("opacities", opacities, 1 / 255),
        ("features_dc", expected["features_dc"].clip(-0.5 / 0.15, 0.5 / 0.15), 1 / 255 / 0.15),
        ("scales", expected["scales"], 1 / 16),
    ]:  # fmt: skip
        np.testing.assert_allclose(found[name][order], value, atol=step, err_msg=name)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.spz"]


@with_program
@pytest.mark.parametrize(("name", "rgb"), [("model.sog", False), (f"levels/{LEVELS}", True)])
def test_sog(tmp_path: Path, name: str, rgb: bool) -> None:
    """Harmonics of eight kinds: a palette holds them."""
    params, output = points(COUNT), tmp_path / "out" / name
    params["features_rest"] = params["features_rest"][torch.arange(COUNT) % 8]
    written = export_compressed(sharded(tmp_path / "nerfstudio_models", params), output, rgb=rgb)
    expected = kept(params)
    count = len(expected["means"])
    assert written == (count, COUNT) and [path.name for path in (tmp_path / "out").iterdir()] == [name.split("/")[0]]
    if name.endswith(LEVELS):
        index = json.loads(output.read_bytes())
        assert index["counts"] == [count, round(count / 4), round(count / 16)] and len(index["filenames"]) == 3
        folders = [(output.parent / path).parent for path in sorted(index["filenames"])]
        found, *coarser = (read_sog(lambda file, at=at: (at / file).read_bytes()) for at in folders)
        assert [len(level["means"]) for level in coarser] == index["counts"][1:]
        assert all(("features_rest" in level) != rgb for level in coarser)
    else:
        found = read_sog(zipfile.ZipFile(output).read)
    assert ("features_rest" in found) != rgb
    expected["opacities"] = torch.sigmoid(torch.from_numpy(expected["opacities"])).numpy()
    expected["quats"] /= np.linalg.norm(expected["quats"], axis=1, keepdims=True)
    order = KDTree(found["means"]).query(expected["means"])[1]
    assert len(set(order)) == len(order) == count
    found["quats"][order] *= np.sign((found["quats"][order] * expected["quats"]).sum(1, keepdims=True))
    steps = {"means": 2**-11, "opacities": 1 / 255, "quats": 0.015}
    for field, value in found.items():
        step = steps.get(field, 0.02)  # of palettes
        np.testing.assert_allclose(value[order], expected[field], rtol=0, atol=step, err_msg=field)


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, version: str = "3.7.0") -> None:
    """Put a program on PATH in place of the real one. It prints its version, or runs `body`."""
    program = tmp_path / PROGRAM
    program.write_text(f'#!/bin/sh\n[ "$*" = --version ] && echo {PROGRAM} v{version} && exit\n{body}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def recorder(log: Path) -> str:
    """Return the body of a program that finds a GPU, writes down its words, and writes an empty file."""
    return f'[ "$*" = --list-gpus ] && exit\necho "$*" >> {log}\nfor word; do last=$word; done\ntouch "$last"'


def test_levels_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, path = tmp_path / "log", ordinary(tmp_path / "nerfstudio_models", points(COUNT))
    fake(tmp_path, monkeypatch, recorder(log))
    output = tmp_path / "levels" / LEVELS
    output.parent.mkdir()  # an empty folder is as good as none
    export_compressed(path, output)
    words = [" ".join(Path(word).name for word in line.split()) for line in log.read_text().splitlines()]
    first = [f"--quiet {n}.ply --decimate 25% {n + 1}.ply" for n in (0, 1)]
    assert words == [*first, f"--quiet 0.ply -l 0 1.ply -l 1 2.ply -l 2 {LEVELS}"]
    assert [file.name for file in output.parent.iterdir()] == [LEVELS]
    with pytest.raises(InputError, match="levels is not empty: levels of detail are many files"):
        export_compressed(path, output, overwrite=True)
    fake(tmp_path, monkeypatch, f'[ "$*" = --list-gpus ] && echo No GPU adapters found. >&2\n{recorder(log)}')
    count, _ = export_compressed(path, tmp_path / "model.sog")
    assert "--quiet --gpu cpu " in log.read_text()
    for suffix, limit, reason in ((".sog", "SOG_ON_CPU", "take hours"), (".spz", "SPZ", "do not fit")):
        monkeypatch.setattr(compressed, f"_MAX_{limit}", count - 1)
        with pytest.raises(InputError, match=f"Harmonics of more than {count - 1} Gaussians {reason}"):
            export_compressed(path, tmp_path / f"more{suffix}")
        assert not (tmp_path / f"more{suffix}").exists()
    export_compressed(path, tmp_path / "plain.sog", rgb=True)
    assert "0.ply --filter-harmonics 0 " in log.read_text()
    export_compressed(path, tmp_path / "some.sog", crop=OrientedBox.from_params(*BOX))
    export_compressed(path, tmp_path / "model.spz", rgb=True)
    assert log.read_text().splitlines()[-1].startswith("--quiet --spz-version 3 ")


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ordinary(tmp_path / "nerfstudio_models", points(60))
    config, log = tmp_path / "config.yml", tmp_path / "log"
    config.write_text("of a run")
    fake(tmp_path, monkeypatch, recorder(log))
    for name in ("a.sog", "a.spz"):
        assert f"Wrote {tmp_path / name} (" in exported(capsys, config, name, "--color", "rgb")
    assert log.read_text().count("--filter-harmonics 0") == 2
    assert f"{tmp_path} is not empty" in exported(capsys, config, LEVELS)


def test_a_box_is_for_spz_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program that writes the PLY that it is given."""
    path, crop = ordinary(tmp_path / "nerfstudio_models", points(COUNT)), OrientedBox.from_params(*BOX)
    fake(tmp_path, monkeypatch, 'shift $(($# - 2))\ncp "$1" "$2"')
    expected = export_ply(path, tmp_path / "model.ply", crop=crop)
    assert export_compressed(path, tmp_path / "model.spz", crop=crop, chunk=37) == expected
    assert 5 < expected[0] < COUNT / 2
    assert (tmp_path / "model.spz").read_bytes() == (tmp_path / "model.ply").read_bytes()
    nowhere = OrientedBox.from_params((90.0, 0.0, 0.0), *BOX[1:])
    with pytest.raises(InputError, match="the box holds none of its"):
        export_compressed(path, tmp_path / "none.spz", crop=nowhere)
    assert not (tmp_path / "none.spz").exists()


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, output = ordinary(tmp_path / "nerfstudio_models", points()), tmp_path / "out" / "model.spz"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="npm install -g @playcanvas/splat-transform"):
        export_compressed(path, output)
    fake(tmp_path, monkeypatch, "echo out of memory >&2\nexit 3")
    with pytest.raises(InputError, match=r"splat-transform ended with status 3, .* out of memory"):
        export_compressed(path, output)
    fake(tmp_path, monkeypatch, "", "2.7.1")
    with pytest.raises(InputError, match=r"v2.7.1 is not version 3 or newer: npm install"):
        export_compressed(path, output)
    assert list(output.parent.iterdir()) == []
    output.touch()
    with pytest.raises(InputError, match="exists already"):
        export_compressed(path, output)
    content = torch.load(path, weights_only=False)
    content["pipeline"]["ns_multigpu.primitive"] = "2dgs"
    content["pipeline"]["_model.gauss_params.scales"] = torch.zeros(50, 2)
    torch.save(content, path)
    with pytest.raises(InputError, match=r"of 2D Gaussians \(2dgs\); model.spz holds 3D Gaussians"):
        export_compressed(path, output, overwrite=True)
