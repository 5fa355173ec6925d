"""The .spz file, opened by a reader that is written from the format's description."""

import gzip
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.scene_box import OrientedBox
from scipy.spatial import KDTree

from ns_multigpu.plugin.export.ply import export_ply, visible
from ns_multigpu.plugin.export.spz import PROGRAM, export_spz
from ns_multigpu.plugin.faults.errors import InputError
from tests.plugin.export.test_exports import BOX
from tests.plugin.export.test_ply_export import ordinary, points, sharded

COUNT = 400
with_program = pytest.mark.skipif(
    shutil.which(PROGRAM) is None, reason=f"needs {PROGRAM}: npm install -g @playcanvas/splat-transform"
)


def read_spz(path: Path) -> dict[str, np.ndarray]:
    """Return some parameters of the points of a file of version 3 (github.com/nianticlabs/spz).

    Its axes are right, up, back; a PLY's are right, down, forward.
    """
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
    positions = fixed / 2**bits * np.array([1, -1, -1])
    return {
        "means": positions,
        "opacities": parts[1] / 255,
        "features_dc": (parts[2] / 255 - 0.5) / 0.15,
        "scales": parts[3] / 16 - 10,
    }


def kept() -> dict[str, Any]:
    """Return the points that an export writes."""
    params = points(COUNT)
    seen = visible(params, None)
    return {name: value[seen].numpy() for name, value in params.items()}


@with_program
def test_spz(tmp_path: Path) -> None:
    written = export_spz(sharded(tmp_path / "nerfstudio_models", points(COUNT)), tmp_path / "out" / "model.spz")
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


def test_a_box_is_for_spz_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program that writes the PLY that it is given."""
    path, crop = ordinary(tmp_path / "nerfstudio_models", points(COUNT)), OrientedBox.from_params(*BOX)
    program = tmp_path / PROGRAM
    program.write_text('#!/bin/sh\nshift $(($# - 2))\ncp "$1" "$2"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    expected = export_ply(path, tmp_path / "model.ply", crop=crop)
    assert export_spz(path, tmp_path / "model.spz", crop=crop, chunk=37) == expected and 5 < expected[0] < COUNT / 2
    assert (tmp_path / "model.spz").read_bytes() == (tmp_path / "model.ply").read_bytes()
    nowhere = OrientedBox.from_params((90.0, 0.0, 0.0), *BOX[1:])
    with pytest.raises(InputError, match="the box holds none of its"):
        export_spz(path, tmp_path / "none.spz", crop=nowhere)
    assert not (tmp_path / "none.spz").exists()


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, output = ordinary(tmp_path / "nerfstudio_models", points()), tmp_path / "out" / "model.spz"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="npm install -g @playcanvas/splat-transform"):
        export_spz(path, output)
    program = tmp_path / PROGRAM
    program.write_text("#!/bin/sh\necho out of memory >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(InputError, match="splat-transform ended with status 3: out of memory"):
        export_spz(path, output)
    assert list(output.parent.iterdir()) == []
    output.touch()
    with pytest.raises(InputError, match="exists already"):
        export_spz(path, output)
    content = torch.load(path, weights_only=False)
    content["pipeline"]["ns_multigpu.primitive"] = "2dgs"
    content["pipeline"]["_model.gauss_params.scales"] = torch.zeros(50, 2)
    torch.save(content, path)
    with pytest.raises(InputError, match=r"of 2D Gaussians \(2dgs\); .spz files hold 3D Gaussians"):
        export_spz(path, output, overwrite=True)
