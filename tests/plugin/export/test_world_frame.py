"""Exports in the capture's own coordinates: the same ellipsoids and colours, to the millimetre at UTM coordinates."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import plyfile
import pytest
import torch
from nerfstudio.data.scene_box import OrientedBox
from scipy.spatial.transform import Rotation
from torch import Tensor

from cuda_ext.reference.projection import sh_basis
from ns_multigpu.plugin.export.ply import export_ply
from ns_multigpu.plugin.export.world_frame import WorldFrame
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.tools.mesh import Mesh, write_mesh
from tests.plugin.export.test_exports import BOX
from tests.plugin.export.test_ply_export import exported, ordinary, points

TURN = Rotation.from_euler("xyz", [0.4, -1.1, 2.0]).as_matrix()
MIRROR = np.diag([1.0, 1.0, -1.0])
UTM, NEAR = np.array([512345.0, 5412345.0, 312.0]), np.array([3.0, -2.0, 0.5])
SCALE = 0.02


def write_run(folder: Path, centre: Any, turn: Any = TURN) -> Path:
    """Write the transform of a run and return its config.yml; the model's origin is at `centre`."""
    folder.mkdir(parents=True, exist_ok=True)
    transform = np.concatenate([turn, (-turn @ centre)[:, None]], 1)
    (folder / "dataparser_transforms.json").write_text(json.dumps({"transform": transform.tolist(), "scale": SCALE}))
    (folder / "config.yml").write_text("of a run")
    return folder / "config.yml"


def read(path: Path) -> Any:
    return plyfile.PlyData.read(str(path))["vertex"]


def stacked(vertex: Any, *names: str) -> Tensor:
    return torch.from_numpy(np.stack([vertex[name].astype(np.float64) for name in names], -1))


def covariances(scales: Tensor, quats: Tensor) -> Tensor:
    turns = torch.from_numpy(Rotation.from_quat(quats[:, [1, 2, 3, 0]].double().numpy()).as_matrix())
    axes = turns * scales.double().exp()[:, None, :]
    return axes @ axes.mT


@pytest.mark.parametrize("turn", [TURN, MIRROR @ TURN], ids=["turned", "mirrored"])
@pytest.mark.parametrize("centre", [UTM, NEAR], ids=["utm", "near"])
@pytest.mark.parametrize("degree", [0, 1, 3])
def test_gaussians_in_the_world(tmp_path: Path, centre: Any, turn: Any, degree: int) -> None:
    params = points(80, degree=degree)
    frame = WorldFrame.of_run(write_run(tmp_path, centre, turn))
    kept, _ = export_ply(ordinary(tmp_path / "m", params), tmp_path / "a.ply", frame=frame, chunk=33)
    vertex, seen = read(tmp_path / "a.ply"), params["opacities"][:, 0] >= -5.5373
    assert kept == int(seen.sum()) and vertex["x"].dtype == (np.float64 if centre is UTM else np.float32)
    back = torch.from_numpy(np.linalg.inv(turn))
    expected = params["means"][seen].double() @ back.T / SCALE + torch.from_numpy(centre)
    error = 1e-4 if centre is UTM else 1e-3  # of 50 units
    torch.testing.assert_close(stacked(vertex, "x", "y", "z"), expected, atol=error, rtol=0)
    found = covariances(
        stacked(vertex, *(f"scale_{k}" for k in range(3))), stacked(vertex, *(f"rot_{k}" for k in range(4)))
    )
    torch.testing.assert_close(
        found,
        back @ covariances(params["scales"][seen], params["quats"][seen]) @ back.T / SCALE**2,
        rtol=1e-4,
        atol=1e-3,
    )
    if degree:
        basis = (degree + 1) ** 2 - 1
        names = [f"f_rest_{k}" for k in range(3 * basis)]
        rest = stacked(vertex, *names).reshape(kept, 3, basis).mT
        directions = torch.nn.functional.normalize(torch.randn(20, 3, dtype=torch.float64), dim=-1)
        in_model = (
            sh_basis(degree, directions @ torch.from_numpy(turn).T)[:, 1:] @ params["features_rest"][seen].double()
        )
        torch.testing.assert_close(sh_basis(degree, directions)[:, 1:] @ rest, in_model, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(vertex["opacity"], params["opacities"][seen][:, 0].numpy())


def test_plain_colours_and_a_box(tmp_path: Path) -> None:
    """The box is in the model's frame, and positions are float64 here as well."""
    params, crop = points(200), OrientedBox.from_params(*BOX)
    frame = WorldFrame.of_run(write_run(tmp_path, UTM))
    checkpoint = ordinary(tmp_path / "m", params)
    kept, _ = export_ply(checkpoint, tmp_path / "a.ply", frame=frame, rgb=True, crop=crop)
    assert (kept, 200) == export_ply(checkpoint, tmp_path / "b.ply", rgb=True, crop=crop)
    world, model = read(tmp_path / "a.ply"), read(tmp_path / "b.ply")
    assert world["x"].dtype == np.float64
    expected = frame.positions(stacked(model, "x", "y", "z").numpy())
    np.testing.assert_allclose(stacked(world, "x", "y", "z").numpy(), expected, atol=1e-9, rtol=0)
    np.testing.assert_array_equal(world["red"], model["red"])


@pytest.mark.parametrize("turn", [TURN, MIRROR @ TURN], ids=["turned", "mirrored"])
@pytest.mark.parametrize("centre", [UTM, NEAR], ids=["utm", "near"])
def test_a_mesh_in_the_world(tmp_path: Path, centre: Any, turn: Any) -> None:
    corners = np.eye(4, 3, dtype=np.float32)
    normals = np.tile(np.float32([0, 0, 1]), (4, 1))
    mesh = Mesh(corners, normals, np.zeros((4, 3), np.uint8), np.array([[0, 1, 3]]))
    write_mesh(mesh, tmp_path / "a.ply", WorldFrame.of_run(write_run(tmp_path, centre, turn)))
    file = plyfile.PlyData.read(str(tmp_path / "a.ply"))
    vertex, triangle = file["vertex"], file["face"]["vertex_indices"][0]
    assert vertex["x"].dtype == (np.float64 if centre is UTM else np.float32)
    found = stacked(vertex, "x", "y", "z").numpy()
    expected = corners.astype(float) @ np.linalg.inv(turn).T / SCALE + centre
    np.testing.assert_allclose(found, expected, atol=1e-5 if centre is NEAR else 1e-8, rtol=0)
    a, b, c = found[triangle]
    outward = np.cross(b - a, c - a)
    outward /= np.linalg.norm(outward)
    np.testing.assert_allclose(outward, stacked(vertex, "nx", "ny", "nz").numpy()[0], atol=1e-5)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ordinary(tmp_path / "nerfstudio_models", points(60))
    config = write_run(tmp_path, UTM)
    run = partial(exported, capsys, config)
    assert "Wrote" in run("a.ply", "--save-world-frame") and "Wrote" in run("b.ply")
    world, model = read(tmp_path / "a.ply"), read(tmp_path / "b.ply")
    assert np.abs(np.median(world["y"]) - UTM[1]) < 100 and model["y"].dtype == np.float32
    assert "a .splat file has no float64 positions" in run("c.splat", "--save-world-frame")
    file = tmp_path / "dataparser_transforms.json"
    file.write_text(json.dumps({"transform": np.diag([1.0, 2.0, 1.0, 0.0])[:3].tolist(), "scale": 1.0}))
    assert "is no rotation" in run("c.ply", "--save-world-frame")
    file.unlink()
    assert f"{file} cannot be read" in run("c.ply", "--save-world-frame") and not (tmp_path / "c.ply").exists()
    with pytest.raises(InputError):
        WorldFrame.of_run(tmp_path / "elsewhere/config.yml")
