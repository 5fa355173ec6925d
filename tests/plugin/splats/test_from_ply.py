"""Runs that begin from a PLY file: which points they begin with, and which files are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

import ns_multigpu
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import degree_of, harmonics
from ns_multigpu.plugin.checkpoint import ply_points
from ns_multigpu.plugin.checkpoint.ply_points import PlyPoints
from ns_multigpu.plugin.export.ply import export_ply
from ns_multigpu.plugin.export.world_frame import WorldFrame
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.gaussians.frame import moved
from tests.lib.ranks import run_ranks
from tests.lib.resuming import middle_of, start, whole
from tests.lib.training_run import save_nothing, write_capture

COUNT = 70


def points(degree: int = 3, count: int = COUNT) -> dict[str, Tensor]:
    """Return opaque Gaussians around the origin."""
    g = torch.Generator().manual_seed(degree)
    return {
        "means": torch.rand(count, 3, generator=g) - 0.5,
        "quats": torch.randn(count, 4, generator=g),
        "scales": torch.randn(count, 3, generator=g) * 0.3 - 2.5,
        "opacities": torch.randn(count, 1, generator=g),
        "features_dc": torch.randn(count, 3, generator=g),
        "features_rest": torch.randn(count, harmonics(degree), 3, generator=g) * 0.3,
    }


def exported(folder: Path, params: dict[str, Tensor]) -> Path:
    """Return the PLY file that our export makes of a checkpoint."""
    folder.mkdir(exist_ok=True)
    pipeline = {f"_model.gauss_params.{name}": value for name, value in params.items()}
    torch.save({"step": 1, "pipeline": pipeline, "optimizers": {}}, folder / "step-000000001.ckpt")
    export_ply(folder / "step-000000001.ckpt", folder / "model.ply", overwrite=True)
    return folder / "model.ply"


def table_of(params: dict[str, Tensor]) -> tuple[list[str], np.ndarray]:
    """Return names and values [n, k] of the properties in Inria's files (`scene/gaussian_model.py`, `save_ply`)."""
    rest = params["features_rest"].transpose(1, 2).flatten(1)
    names = ["x", "y", "z", "nx", "ny", "nz", *(f"f_dc_{i}" for i in range(3))]
    names += [*(f"f_rest_{i}" for i in range(rest.shape[1])), "opacity"]
    names += [*(f"scale_{i}" for i in range(params["scales"].shape[1])), *(f"rot_{i}" for i in range(4))]
    normal = torch.zeros_like(params["means"])
    parts = (params["means"], normal, params["features_dc"], rest, params["opacities"], params["scales"])
    return names, torch.cat([*parts, params["quats"]], dim=1).numpy()


def write(path: Path, names: list[str], table: np.ndarray, form: str = "binary_little_endian") -> Path:
    lines = ["ply", f"format {form} 1.0", f"element vertex {len(table)}", *(f"property float {n}" for n in names)]
    path.write_bytes("\n".join([*lines, "end_header\n"]).encode() + table.astype("<f4").tobytes())
    return path


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def of_degree(params: dict[str, Tensor], degree: int) -> dict[str, Tensor]:
    """Return the points with harmonics of a degree: further ones dropped, or zeros added."""
    rest, wanted = (
        params["features_rest"][:, : harmonics(degree)],
        torch.zeros(len(params["means"]), harmonics(degree), 3),
    )
    wanted[:, : rest.shape[1]] = rest
    return {**params, "features_rest": wanted}


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("made", [0, 1, 3])
def test_the_points_of_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: int, degree: int) -> None:
    """Bit for bit, in chunks, for lower and higher degrees. Colours of degree 0 pass through a sigmoid."""
    monkeypatch.setattr(ply_points, "CHUNK", 16)
    params = points(made)
    file = PlyPoints(exported(tmp_path, params), "3dgs", degree)
    assert (len(file), file.degree) == (COUNT, made)
    expected = of_degree(params, degree)
    if made == 0:
        expected["features_dc"] = (torch.sigmoid(params["features_dc"]) - 0.5) / 0.28209479177387814
    found = file.read(range(COUNT))
    torch.testing.assert_close(found.pop("features_dc"), expected.pop("features_dc"), rtol=1e-6, atol=1e-6)
    assert_same(found, expected)
    rows = torch.tensor([3, 68, 2] * 9)
    assert_same({"means": file.read(rows)["means"]}, {"means": params["means"][rows]})
    torch.testing.assert_close(PlyPoints(tmp_path / "model.ply", "3dgs", 0).read(range(COUNT))["features_dc"].sigmoid(),
        (expected_color(params, made)).clamp(1e-6, 1 - 1e-6))  # fmt: skip


def expected_color(params: dict[str, Tensor], degree: int) -> Tensor:
    plain = params["features_dc"]
    return plain.sigmoid() if degree == 0 else plain * 0.28209479177387814 + 0.5


def test_other_writers(tmp_path: Path) -> None:
    """Any order of properties, more of them, either byte order, and 2D Gaussians."""
    params = points()
    names, table = table_of(params)
    inria = PlyPoints(write(tmp_path / "inria.ply", names, table), "3dgs", 3)
    assert_same(inria.read(range(COUNT)), params)
    order = np.random.default_rng(0).permutation(len(names))
    mixed = write(tmp_path / "mixed.ply", [*(names[i] for i in order), "label"], np.c_[table[:, order], table[:, :1]])
    assert_same(PlyPoints(mixed, "3dgs", 3).read(range(COUNT)), params)
    big = tmp_path / "big.ply"
    write(big, names, table.astype("<f4").byteswap().view("<f4"), "binary_big_endian")
    assert_same(PlyPoints(big, "3dgs", 3).read(range(COUNT)), params)
    flat = {**params, "scales": params["scales"][:, :2]}
    file = write(tmp_path / "flat.ply", *table_of(flat))
    assert_same(PlyPoints(file, "2dgs", 3).read(range(COUNT)), flat)
    with pytest.raises(InputError, match=r"holds no 3D Gaussians \(3dgs\): its vertices have no scale_2"):
        PlyPoints(file, "3dgs", 3)
    with pytest.raises(InputError, match=r"it holds 3D Gaussians. Use --pipeline.model.primitive 3dgs"):
        PlyPoints(mixed, "2dgs", 3)
    with pytest.raises(InputError, match="PLY files have no place for 3D convexes"):
        PlyPoints(mixed, "convex", 3)


def test_refused(tmp_path: Path) -> None:
    names, table = table_of(points())
    file = write(tmp_path / "model.ply", names, table)
    with pytest.raises(InputError, match=r"--load-ply .*nothing.ply"):
        PlyPoints(tmp_path / "nothing.ply", "3dgs", 3)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="it is truncated: it ends in point 70 of 70"):
        PlyPoints(file, "3dgs", 3)
    cloud = write(tmp_path / "cloud.ply", names[:6], table[:, :6])
    with pytest.raises(InputError, match=r"holds no 3D Gaussians \(3dgs\): .* f_dc_0, f_dc_1, f_dc_2, opacity, rot_0"):
        PlyPoints(cloud, "3dgs", 3)
    (tmp_path / "text.ply").write_text("ply\nformat ascii 1.0\nelement vertex 0\nproperty float x\n"
        "property float y\nproperty float z\nend_header\n")  # fmt: skip
    with pytest.raises(InputError, match=r"it is text. Give a binary"):
        PlyPoints(tmp_path / "text.ply", "3dgs", 3)
    (tmp_path / "photo.ply").write_bytes(b"\xff\xd8" * 99)
    with pytest.raises(InputError, match=r"it is no .ply file"):
        PlyPoints(tmp_path / "photo.ply", "3dgs", 3)
    with pytest.raises(InputError, match="its 44 f_rest properties are not the harmonics of any degree"):
        PlyPoints(write(file, names[:53] + names[54:], np.delete(table, 53, axis=1)), "3dgs", 3)
    with pytest.raises(InputError, match="it holds no point"):
        PlyPoints(write(file, names, table[:0]), "3dgs", 3)
    table[41, names.index("rot_2")] = np.nan
    damaged = PlyPoints(write(file, names, table), "3dgs", 3)
    damaged.read(range(41))
    with pytest.raises(InputError, match="quats of point 42 is NaN or infinite"):
        damaged.read(range(30, COUNT))


def drawn(params: dict[str, Tensor], viewmat: Tensor) -> Tensor:
    """Return an image of the points by a camera [4, 4]."""
    intrinsics = torch.tensor([[[60.0, 0, 32], [0, 60.0, 32], [0, 0, 1]]])
    colors = torch.cat([params["features_dc"][:, None], params["features_rest"]], dim=1)
    image, _, _ = ns_multigpu.render(
        params["means"], params["quats"], params["scales"].exp(), params["opacities"].sigmoid()[:, 0], colors,
        viewmat[None], intrinsics, 64, 64, sh_degree=degree_of(params["features_rest"].shape[1]),
    )  # fmt: skip
    return image


def test_another_frame_shows_the_same() -> None:
    """A camera that moves with the Gaussians sees the same picture, harmonics included."""
    params, scale = points(), 2.5
    rotation = torch.from_numpy(Rotation.from_rotvec([0.4, -1.1, 0.7]).as_matrix()).float()
    shift = torch.tensor([0.3, -2.0, 1.0])
    view = torch.eye(4)
    view[2, 3] = 3.0
    # x' = scale (R x + t); a camera sees scale (R_c x + t_c), which has the same projection.
    there = view.clone()
    there[:3, :3] = view[:3, :3] @ rotation.T
    there[:3, 3] = scale * (view[:3, 3] - there[:3, :3] @ shift)
    before = drawn(params, view)
    after = drawn(moved(params, torch.cat([rotation, shift[:, None]], dim=1), scale), there)
    assert before.std() > 0.05
    torch.testing.assert_close(after, before, atol=2e-4, rtol=0)
    with pytest.raises(ValueError, match="is no rotation"):
        moved(params, torch.diag(torch.tensor([1.0, 1.0, 2.0]))[:, [0, 1, 2, 2]], 1.0)


@pytest.mark.parametrize("mirrored", [False, True])
def test_exports_in_world_coordinates_come_back(tmp_path: Path, mirrored: bool) -> None:
    """At UTM coordinates, where float32 has steps of half a metre."""
    params, factor, origin = points(), 40.0, np.array([5e5, 5.4e6, 300.0])
    rotation = Rotation.from_rotvec([0.4, -1.1, 0.7]).as_matrix() * (-1 if mirrored else 1)
    exported(tmp_path, params)
    frame = WorldFrame(rotation, factor, origin)
    export_ply(tmp_path / "step-000000001.ckpt", tmp_path / "world.ply", frame=frame)
    back = torch.from_numpy(np.column_stack([rotation.T, -rotation.T @ origin]))
    found = PlyPoints(tmp_path / "world.ply", "3dgs", 3, (back, 1 / factor)).read(range(COUNT))
    for name, value in params.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


def run(world: World, folder: Path, method: str, strategy: str) -> dict[str, Any]:
    """Return the points that a run begins with, by place, those on this rank, and its points after training."""
    trainer = start(world, folder / "capture", folder / method / str(world.size) / str(world.rank), 3, method=method,
        strategy=strategy, load_ply=folder / "model.ply", sh_degree=2)  # fmt: skip
    prefix = "model/gauss_params."
    model: Any = trainer.pipeline.model
    first = {name.removeprefix(prefix): value for name, value in whole(trainer, world).items() if prefix in name}
    here, degree = model.num_points, trainer.pipeline.model.primitive(depth=False).sh_degree
    model.step = 8
    full = model.primitive(depth=False).sh_degree
    save_nothing(trainer)
    trainer.train()
    after = whole(trainer, world)[f"{prefix}means"]
    return {"first": first, "here": here, "degrees": (degree, full), "finite": bool(after.isfinite().all())}


@pytest.mark.parametrize(("method", "strategy", "ranks"), [
    ("splatfacto-batch", "batch", 1), ("splatfacto-tile", "tile", 2), ("splatfacto-pixel", "pixel", 2),
])  # fmt: skip
def test_a_run_begins_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, strategy: str, ranks: int
) -> None:
    write_capture(tmp_path / "capture")
    params = points()
    exported(tmp_path, params)
    found = run_ranks(run, ranks, tmp_path, method, strategy)
    for rank in found:
        assert_same({name: rank["first"][name] for name in params}, of_degree(params, 2))
        assert rank["degrees"] == (0, 2) and rank["finite"]
    assert sum(rank["here"] for rank in found) == COUNT


def test_a_run_begins_from_a_file_in_the_captures_frame(tmp_path: Path) -> None:
    write_capture(tmp_path / "capture")
    file = exported(tmp_path, points())
    trainer = start(
        World.single(), tmp_path / "capture", tmp_path / "run", 1, load_ply=file, load_ply_frame="capture", sh_degree=3
    )
    outputs = trainer.pipeline.datamanager.train_dataparser_outputs
    expected = moved(points(), outputs.dataparser_transform, float(outputs.dataparser_scale))
    assert outputs.dataparser_scale != 1 and bool(outputs.dataparser_transform[:, 3].any())
    model: Any = trainer.pipeline.model
    assert_same(dict(model.gauss_params.items()), expected)


def test_a_run_that_resumes_does_not_need_it(tmp_path: Path) -> None:
    write_capture(tmp_path / "capture")
    file = exported(tmp_path, points())
    here = (World.single(), tmp_path / "capture")
    first = start(*here, tmp_path / "first", 6, load_ply=file, steps_per_save=4, keep_checkpoints=0)
    first.train()
    file.unlink()
    with pytest.raises(InputError, match="No such file"):
        start(*here, tmp_path / "again", 6, load_ply=file)
    resumed = start(*here, tmp_path / "resumed", 8, load_ply=file, load_checkpoint=middle_of(first))
    model: Any = resumed.pipeline.model
    assert resumed._start_step == 5 and model.config.sh_degree_interval == 1
