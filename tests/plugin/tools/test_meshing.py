"""`ns-multigpu export-mesh`: a mesh of a sphere is that sphere, on any ranks; and unsupported requests are refused."""

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import CameraType
from nerfstudio.utils.rich_utils import CONSOLE

from ns_multigpu.cli import main
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Patch, Pixels, View
from ns_multigpu.plugin.faults.errors import InputError, SaveFailed
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.tools import fusion, mesh, models
from ns_multigpu.plugin.tools.fusion import Fusion, looked_at, surface_of
from ns_multigpu.plugin.tools.mesh import LEAST_TRIANGLES, Mesh, largest_parts, write_mesh
from ns_multigpu.plugin.tools.meshing import Meshing
from ns_multigpu.primitives.gaussians.init import SH_C0
from tests.lib.ranks import run_ranks
from tests.lib.rendering import make_pipeline, write_capture
from tests.lib.trained_run import write_run
from tests.strategies.scene import look_at

o3d: Any = pytest.importorskip("open3d")
RADIUS, VOXEL = 0.5, 0.02
SPHERE = Meshing(Path("sphere.ply"), max_depth=2.0, voxel=VOXEL, downscale=0.4)


def sphere(count: int, scales: int) -> dict[str, torch.Tensor]:
    """Gaussians that lie flat on a sphere, all but opaque: red above the height -0.15, and blue below."""
    k = torch.arange(count) + 0.5
    z, turn = 1 - 2 * k / count, k * torch.pi * (1 + 5**0.5)
    out = torch.stack([turn.cos() * (1 - z * z).sqrt(), turn.sin() * (1 - z * z).sqrt(), z], 1)
    # The rotation that takes the z axis outwards: 1 + z, and z x outwards.
    quats = torch.stack([1 + out[:, 2], -out[:, 1], out[:, 0], torch.zeros(count)], 1)
    colors = torch.where(z[:, None] > -0.3, torch.tensor([0.9, 0.1, 0.1]), torch.tensor([0.1, 0.1, 0.9]))
    sizes = torch.tensor([0.015, 0.015, 1e-3])[:scales].log()
    return {
        "means": RADIUS * out, "quats": quats, "scales": sizes.expand(count, scales).clone(),
        "opacities": torch.full((count, 1), 4.0), "features_dc": (colors - 0.5) / SH_C0,
        "features_rest": torch.zeros(count, 15, 3),
    }  # fmt: skip


def make(world: World, capture: Path, work: Meshing, strategy: str, primitive: str, *, panoramas: bool = False) -> None:
    """Make a mesh of the sphere, as a tool does."""
    pipeline = make_pipeline(world, capture, strategy, primitive=primitive, normal_loss=0.0)
    if panoramas:
        cameras = pipeline.datamanager.train_dataset.cameras
        cameras.camera_type.fill_(CameraType.EQUIRECTANGULAR.value)
        cameras.width.fill_(400)
    params = sphere(8000, 2 if primitive == "2dgs" else 3)
    rows = slice(None)
    if not pipeline.strategy.placement.replicated:
        rows = slice(world.rank * 4000, 8000 if world.size == 1 else (world.rank + 1) * 4000)
    for name, value in params.items():
        pipeline.model.gauss_params[name] = torch.nn.Parameter(value[rows].contiguous())
    if pipeline.model.shard_index is not None:
        pipeline.model.shard_index.hold(None, pipeline.model.gauss_params["means"])
        pipeline.model.count_shards()
    pipeline.eval()
    CONSOLE.quiet = True
    try:
        work.run(None, Path("step-7.ckpt"), pipeline)
    finally:
        CONSOLE.quiet = False


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Vertices, sorted, for open3d writes them in any order, and their colours."""
    mesh = o3d.io.read_triangle_mesh(str(path))
    assert len(mesh.triangles) > 1000
    vertices = np.asarray(mesh.vertices)
    order = np.lexsort(vertices.T)
    return vertices[order], np.asarray(mesh.vertex_colors)[order]


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_capture(tmp_path_factory.mktemp("capture") / "tiny", held_out=2)


@pytest.fixture(scope="module")
def alone(capture: Path) -> Path:
    """Return the mesh of 2D Gaussians that one process makes."""
    output = capture / "sphere.ply"
    make(World.single(), capture, replace(SPHERE, output=output), "single", "2dgs")
    return output


def close_to_the_sphere(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a mesh whose vertices are within half a voxel of the sphere in the mean, and all within one and a half."""
    vertices, colors = read(path)
    off = np.abs(np.linalg.norm(vertices, axis=1) - RADIUS)
    assert off.mean() < VOXEL / 2 and off.max() < 1.5 * VOXEL
    return vertices, colors


def test_the_mesh_of_a_sphere_is_the_sphere(alone: Path) -> None:
    vertices, colors = close_to_the_sphere(alone)
    assert not list(alone.parent.glob(".*part*"))
    north, south = colors[vertices[:, 2] > -0.1].mean(0), colors[vertices[:, 2] < -0.2].mean(0)
    assert north[0] > 0.8 and north[2] < 0.2 and south[2] > 0.8 and south[0] < 0.2
    around = np.arctan2(vertices[:, 1], vertices[:, 0])
    assert np.histogram(around, 8, (-np.pi, np.pi))[0].min() > 50, "all sides"


@pytest.mark.parametrize(("primitive", "depth"), [("3dgs", "auto"), ("2dgs", "expected")])
def test_expected_depth_makes_one_too(capture: Path, alone: Path, tmp_path: Path, primitive: str, depth: Any) -> None:
    output = tmp_path / "mesh" / "sphere.ply"
    make(World.single(), capture, replace(SPHERE, output=output, depth=depth), "single", primitive)
    vertices, _ = close_to_the_sphere(output)
    assert len(vertices) != len(read(alone)[0])


def test_panoramas_make_one_too(capture: Path, tmp_path: Path) -> None:
    output = tmp_path / "sphere.ply"
    make(World.single(), capture, replace(SPHERE, output=output), "single", "2dgs", panoramas=True)
    close_to_the_sphere(output)


def make_twice(world: World, capture: Path, folder: Path) -> None:
    """Each rank with all points, and with a half of them."""
    for strategy in ("batch", "tile"):
        make(world, capture, replace(SPHERE, output=folder / f"{strategy}.ply"), strategy, "2dgs")


def test_several_make_what_one_makes(capture: Path, alone: Path, tmp_path: Path) -> None:
    """Seven views: one rank has none of the last round."""
    run_ranks(make_twice, 2, capture, tmp_path)
    expected, theirs = read(alone)
    found, colors = read(tmp_path / "batch.ply")
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(colors, theirs)
    found, _ = read(tmp_path / "tile.ply")
    assert abs(len(found) - len(expected)) <= len(expected) // 500
    np.testing.assert_allclose(found.mean(0), expected.mean(0), atol=1e-3)


def ring(views: int, height: float = 0.5) -> list[torch.Tensor]:
    """World-to-camera matrices of views around the origin, at a distance of 2 and a little more."""
    turns = torch.arange(views) * 2 * torch.pi / views
    return [look_at([2 * float(t.cos()), 2 * float(t.sin()), height], [0, 0, 0]) for t in turns]


def fused_sphere() -> Fusion:
    """Fuse twelve exact views of the sphere, and one of nothing."""
    width, height, focal = 80, 60, 90.0
    K = torch.tensor([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1]]).double()
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    rays = torch.stack([(x - width / 2) / focal, (y - height / 2) / focal, torch.ones_like(x)], -1).double()
    fused = Fusion(VOXEL, 5 * VOXEL, 4.0)
    fused.add(torch.zeros(height, width, 3), torch.full((height, width, 1), 4.1), View(ring(1)[0], K, width, height))
    assert len(fused.mesh().triangles) == 0, "beyond the largest depth there is nothing"
    for viewmat in ring(12):
        square, middle, rest = rays.square().sum(-1), rays @ viewmat[:3, 3], viewmat[:3, 3].square().sum() - RADIUS**2
        root = middle.square() - square * rest
        depth = torch.where(root > 0, (middle - root.clamp(min=0).sqrt()) / square, 0.0)
        color = torch.rand(height, width, 3, generator=torch.Generator().manual_seed(0))
        fused.add(color, depth[..., None], View(viewmat, K, width, height))
    return fused


def test_fusion_of_exact_depths_is_exact() -> None:
    """A pixel's depth is that of its middle: half a pixel off, and the mean error is more than twice as large."""
    found = fused_sphere().mesh()
    off = np.abs(np.linalg.norm(found.vertices, axis=1) - RADIUS)
    assert len(off) > 5000 and off.mean() < 0.2 * VOXEL
    assert abs(found.colors.mean() - 127.5) < 5


def content(found: Mesh) -> tuple[set[bytes], list[tuple[bytes, ...]]]:
    """Return vertices with normals and colours, and triangles by their vertices' positions in order of rotation."""
    rows = np.concatenate([found.vertices.view(np.int32), found.normals.view(np.int32), found.colors], 1)
    positions = [row.tobytes() for row in found.vertices]
    triangles = [[positions[k] for k in corners] for corners in found.triangles]
    starts = [min(range(3), key=corners.__getitem__) for corners in triangles]
    turned = [tuple(corners[k:] + corners[:k]) for corners, k in zip(triangles, starts, strict=True)]
    return {row.tobytes() for row in rows}, sorted(turned)


def test_divided_extraction_equals_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """open3d counts bytes in 32 bits: large fields are fused into several grids and extracted in pieces."""
    fused = fused_sphere()
    whole = fused._grids[0].extract_triangle_mesh(weight_threshold=0.5)
    monkeypatch.setattr(fusion, "BLOCKS_PER_GRID", 20)
    monkeypatch.setattr(fusion, "BLOCKS_AT_ONCE", 40)
    new_grid, sizes = Fusion._new_grid, list[int]()
    monkeypatch.setattr(Fusion, "_new_grid", lambda self, size: sizes.append(size) or new_grid(self, size))
    divided = fused_sphere()
    assert [grid.hashmap().size() for grid in divided._grids][:-1] == [20] * (len(divided._grids) - 1)
    assert len(divided._grids) > 2
    sizes.clear()
    found = divided.mesh()
    assert len(sizes) > 2 and max(sizes) <= 40
    assert len(found.vertices) == len(whole.vertex.positions), "no vertex twice"
    attributes = whole.vertex
    colors = np.rint(attributes.colors.numpy() * 255).astype(np.uint8)
    expected = Mesh(attributes.positions.numpy(), attributes.normals.numpy(), colors, whole.triangle.indices.numpy())
    assert content(found) == content(expected)
    assert largest_parts(found, 9)[1:] == largest_parts(expected, 9)[1:]


def test_fine_voxels_of_coarse_images_give_no_holes() -> None:
    """Blocks of voxels are smaller here than the four pixels by which open3d looks for them."""
    K = torch.tensor([[25.0, 0, 16], [0, 25, 12], [0, 0, 1]]).double()
    fused = Fusion(0.005, 0.02, 1.0)
    fused.add(torch.zeros(24, 32, 3), torch.full((24, 32, 1), 0.9), View(torch.eye(4).double(), K, 32, 24))
    sheet, parts, kept = largest_parts(fused.mesh(), 1)
    assert parts == kept == 1, "one sheet, whole"
    whole = 32 * 24 * (0.9 / 25) ** 2
    a, b, c = sheet.vertices[sheet.triangles.T]
    assert 0.9 * whole < np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2 < whole


def test_common_point_of_views() -> None:
    poses = torch.stack(
        [torch.linalg.inv(view) @ torch.diag(torch.tensor([1.0, -1, -1, 1])).double() for view in ring(5)]
    )
    point, distance = looked_at(poses[:, :3])
    assert float(point.norm()) < 1e-9 and distance == pytest.approx(4.25**0.5)
    poses[0, :3, 3] *= 0.5
    assert looked_at(poses[:, :3])[1] == pytest.approx(4.25**0.5 / 2), "the nearest"
    with pytest.raises(InputError, match=r"look the same way.*--max-depth"):
        looked_at(poses[:1, :3].expand(4, 3, 4))
    poses[:, :3, :3] *= -1
    with pytest.raises(InputError, match=r"look away.*--max-depth"):
        looked_at(poses[:, :3])


def test_sizes_follow_from_the_views(capture: Path) -> None:
    cameras = make_pipeline(World.single(), capture, "single").datamanager.train_dataset.cameras
    found = Meshing(Path("a.ply")).sizes(cameras)
    depth = 2 * looked_at(cameras.camera_to_worlds)[1]
    assert (found.max_depth, found.voxel) == (depth, depth / 1024) and found.truncation == 5 * found.voxel
    found = Meshing(Path("a.ply"), voxel=0.1, max_depth=3.0, truncation=0.2).sizes(cameras)
    assert (found.voxel, found.truncation, found.max_depth) == (0.1, 0.2, 3.0)
    for wrong, said in (
        ({"voxel": 1e-6, "max_depth": 1.0}, "--voxel-size 1e-06: along a depth of 1 that is 1e.06 voxels"),
        ({"voxel": 2.0, "max_depth": 1.0}, "--voxel-size 2"),
        ({"voxel": 0.1, "truncation": 0.01}, "--truncation 0.01: give at least the size of a voxel, 0.1"),
    ):
        with pytest.raises(InputError, match=said):
            Meshing(Path("a.ply"), **wrong).sizes(cameras)


def test_transparent_regions_are_no_surface() -> None:
    alpha, depth = torch.tensor([0.4, 0.8, 1.0]).view(1, 3, 1), torch.tensor([1.0, 2.0, 0.0]).view(1, 3, 1)
    pixels = Pixels(Patch(0, 0, 0, 3, 1), alpha * torch.tensor([0.5, 0.25, 1.0]), alpha, depth)
    color, seen = surface_of(pixels, 0.5)
    assert seen.flatten().tolist() == [0.0, 2.0, 0.0]
    torch.testing.assert_close(color[0, 1], torch.tensor([0.5, 0.25, 1.0]))


def test_largest_components_are_kept() -> None:
    sizes = [(6, 20), (5, 12), (4, 10), (1, 3)]  # radius; how fine
    whole, counts = o3d.geometry.TriangleMesh(), []
    for radius, fine in sizes:
        one = o3d.geometry.TriangleMesh.create_sphere(radius, fine).translate((30.0 * fine, 0, 0))
        counts.append(len(one.triangles))
        whole += one
    assert counts[3] < LEAST_TRIANGLES < counts[2]
    vertices, triangles = np.asarray(whole.vertices, np.float32), np.asarray(whole.triangles)
    flat = triangles[:1, [0, 1, 1]]  # belongs to the largest part, and has no area
    spheres = Mesh(vertices, vertices, np.zeros(vertices.shape, np.uint8), np.concatenate([triangles, flat]))
    assert largest_parts(spheres, 9)[1:] == (4, 3), "the smallest is noise"
    kept, before, after = largest_parts(spheres, 2)
    assert (before, after) == (4, 2)
    count = counts[0] // 2 + counts[1] // 2 + 4
    assert len(kept.triangles) == counts[0] + counts[1] and len(kept.vertices) == count
    np.testing.assert_array_equal(kept.vertices[kept.triangles], vertices[triangles[: counts[0] + counts[1]]])
    assert largest_parts(Mesh.empty(), 3)[1:] == (0, 0)


def test_a_file_has_the_mesh_in_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "_ROWS_AT_ONCE", 3)
    values = torch.rand(7, 3, 3, generator=torch.Generator().manual_seed(0)).numpy()
    colors = np.arange(21, dtype=np.uint8).reshape(7, 3)
    corners = np.array([[0, 1, 2], [2, 1, 3], [4, 5, 6], [6, 5, 0], [1, 4, 6]])
    write_mesh(Mesh(values[:, 0], values[:, 1], colors, corners), tmp_path / "a.ply")
    read = o3d.io.read_triangle_mesh(str(tmp_path / "a.ply"))
    np.testing.assert_array_equal(np.asarray(read.vertices, np.float32), values[:, 0])
    np.testing.assert_array_equal(np.asarray(read.vertex_normals, np.float32), values[:, 1])
    np.testing.assert_allclose(np.asarray(read.vertex_colors) * 255, colors, atol=1e-9)
    np.testing.assert_array_equal(np.asarray(read.triangles), corners)
    body = (tmp_path / "a.ply").read_bytes().partition(b"end_header\n")[2]
    assert len(body) == 7 * 27 + 5 * 13


REFUSED = [
    ({"output": Path("a.stl")}, "--output-path a.stl: give the name of a .ply file"),
    ({"output": Path(__file__).with_suffix(".ply")}, "exists already"),
    ({"max_depth": 0.0}, "--max-depth 0.0"),
    ({"voxel": float("nan")}, "--voxel-size nan"),
    ({"truncation": -1.0}, "--truncation -1.0"),
    ({"downscale": float("inf")}, "--downscale-factor inf"),
    ({"resolution": 0}, "--resolution 0"),
    ({"parts": 0}, "--parts 0"),
    ({"least_alpha": 0.0}, "--min-opacity 0.0"),
    ({"output": Path("/proc/nowhere/a.ply")}, "cannot be written"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_invalid_options_are_refused(options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "test_meshing.ply")
    with pytest.raises(InputError, match=said):
        Meshing(**{"output": Path("a.ply"), **options}).check()


def test_missing_open3d_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "open3d", None)
    with pytest.raises(InputError, match=r"made by open3d, which cannot be loaded .*pip install open3d"):
        Meshing(tmp_path / "a.ply").check()


def test_mesh_of_each_primitive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"4D Gaussians \(4dgs\): they move.*2dgs or 3dgs"):
        Meshing(tmp_path / "a.ply").check_points("4dgs")
    with pytest.raises(InputError, match=r"--depth median: 3D Gaussians \(3dgs\) have expected depth alone"):
        Meshing(tmp_path / "a.ply", depth="median").check_points("3dgs")
    Meshing(tmp_path / "a.ply", depth="median").check_points("2dgs")


class _FullDisk:
    def format(self, **_: int) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_empty_mesh_and_full_disk_are_reported(capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = replace(SPHERE, output=tmp_path / "a.ply", max_depth=0.3)
    with pytest.raises(InputError, match=r"step-7.ckpt: there would be nothing.*0 and 0.3 \(--max-depth\)"):
        make(World.single(), capture, nothing, "single", "2dgs")
    monkeypatch.setattr(mesh, "_HEADER", _FullDisk())
    with pytest.raises(SaveFailed, match=r"a.ply could not be written: No space left.*another --output-path"):
        write_mesh(Mesh.empty(), tmp_path / "a.ply")
    assert not os.listdir(tmp_path)


def test_the_command_makes_a_mesh_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command reads a run's checkpoint and applies its options."""
    run, output = write_run(tmp_path), tmp_path / "mesh.ply"
    options = "--max-depth 3 --voxel-size 0.05 --min-opacity 0.2 --downscale-factor 0.5 --parts 2 --truncation 0.2"
    words = ["export-mesh", "--load-config", str(run), "--output-path", str(output), *options.split()]
    try:
        transform = {"transform": [[1, 0, 0, -5e5], [0, 1, 0, -5e6], [0, 0, 1, -300]], "scale": 0.5}
        (run.parent / "dataparser_transforms.json").write_text(json.dumps(transform))
        main([*words, "--num-devices", "1", "--device-type", "cpu", "--save-world-frame"])
    finally:
        set_world(None)
    said = " ".join(capsys.readouterr().out.split())
    assert "expected depth, limit 3, voxel 0.05, truncation 0.2" in said and "kept the 2 largest of" in said
    made = o3d.io.read_triangle_mesh(str(output))
    assert len(made.triangles) > 100 and np.abs(np.asarray(made.vertices) - [5e5, 5e6, 300]).max() < 9
    given: list[Any] = []
    usual, models.run_tool = models.run_tool, lambda *arguments: given.append(arguments[2])
    try:
        main([*words, "--resolution", "9", "--depth", "median", "--overwrite"])
    finally:
        models.run_tool = usual
    assert given == [Meshing(output, 3.0, 0.05, 0.2, 9, 2, "median", 0.2, 0.5, True)]
