"""`ns-multigpu eval` and `render` of a radiance field: several workers, each with its cells, write what one writes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.field_components.field_heads import FieldHeadNames
from PIL import Image
from scipy.spatial import KDTree

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.radiance.run.pictures import FieldPictures
from ns_multigpu.plugin.render.service import RenderRequest
from ns_multigpu.plugin.run.config import read_config
from ns_multigpu.plugin.tools import rendering
from ns_multigpu.plugin.tools.frames import Look
from ns_multigpu.plugin.tools.meshing import Meshing
from ns_multigpu.plugin.tools.models import Evaluation, load_model, run_tool
from ns_multigpu.plugin.tools.rendering import FilmRendering
from ns_multigpu.plugin.tools.shots import CameraPath, Dataset, Spiral
from tests.lib.ranks import run_ranks
from tests.lib.rendering import write_capture
from tests.lib.trained_run import write_path
from tests.plugin.radiance.run.test_radiance_run import CELLS, configured, trained


def write_run(folder: Path, **options: Any) -> Path:
    """Train a field for two steps, with options of its model, and return the run's config.yml."""
    config = configured(write_capture(folder / "capture", held_out=2), folder / "runs", steps=2, **options)
    trained(World.single(), config)
    config.save_config()
    return config.get_base_dir() / "config.yml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("field"))


def works(run: Path, folder: Path) -> list[Any]:
    """Run the tools on it."""
    path = write_path(run.parent / "path.json")
    around = write_path(run.parent / "around.json", 1, camera_type="equirectangular", crop=None)
    outputs = Look(("rgb", "depth", "expected_depth"))
    return [
        Evaluation(folder / "results.json", folder / "images"),
        FilmRendering(CameraPath(path), folder / "path", outputs, 2.0, "png"),
        FilmRendering(CameraPath(around), folder / "around", Look(("rgba",)), 1.0, "png"),
        FilmRendering(Spiral(0.2, 10), folder / "spiral", Look(("rgb",)), 1.0, "png"),
        FilmRendering(Dataset("test"), folder / "views", Look(()), 1.0, "png"),
    ]


def use(world: World, run: Path, folder: Path) -> tuple[list[int], int]:
    """Do all of it; the cells that this rank had, and how many frames it had to write."""
    set_world(world)
    usual, written = rendering._Artist.draw, list[str]()

    def draw(self: Any, shot: Any, *how: Any) -> Any:
        outputs = usual(self, shot, *how)
        written.extend([] if outputs is None else [shot.name])
        return outputs

    rendering._Artist.draw = draw  # type: ignore[method-assign]
    (checkpoint,) = (run.parent / "nerfstudio_models").glob("*.ckpt")
    cells: list[int] = []
    for work in works(run, folder):
        config = read_config(run)
        pipeline: Any = load_model(config, checkpoint, world, work.test_mode)
        cells = list(pipeline.model.numbers)
        work.run(config, checkpoint, pipeline)
    rendering._Artist.draw = usual  # type: ignore[method-assign]
    set_world(None)
    return cells, len(written)


def test_several_write_what_one_writes(run: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert use(World.single(), run, one) == (list(range(CELLS)), 8)
    cells, written = zip(*run_ranks(use, 2, run, two), strict=True)
    assert written == (5, 3), "they take turns: 3, 1, 2 and 2 frames"
    assert [number for some in cells for number in some] == list(range(CELLS)) and all(cells)
    reported, expected = (json.loads((folder / "results.json").read_text())["results"] for folder in (two, one))
    assert reported.keys() == expected.keys()
    assert reported["psnr"] == pytest.approx(expected["psnr"], rel=1e-5)
    names = sorted(str(file.relative_to(one)) for file in one.rglob("*.png"))
    counts = {name: len([n for n in names if n.startswith(name)]) for name in ("images", "path", "around", "spiral")}
    assert counts == {"images": 6, "path": 3, "around": 1, "spiral": 2}
    views = {name.split("/")[2] for name in names if name.startswith("views")}
    assert views == {"gt-rgb", "rgb", "depth", "accumulation", "expected_depth"}
    for name in names:
        with Image.open(one / name) as ours, Image.open(two / name) as theirs:
            difference = np.abs(np.asarray(ours, dtype=np.int32) - np.asarray(theirs, dtype=np.int32))
            assert difference.max() <= 1, name
    with Image.open(one / "path" / "00000.png") as image:
        pixels = np.asarray(image)
        assert pixels.shape == (17, 75, 3)
        assert (pixels[0, 0] == (10, 20, 30)).all(), "outside of the crop its background is seen"
        assert pixels[:, :25].std() > 5


# ---- a mesh ----

MIDDLE, RADIUS, VOXEL = np.array([0, 0, -0.25], np.float32), 0.2, 0.02


def _ball(cell: Any) -> None:
    """Make a cell's field an opaque ball: red above, blue below."""

    def density(positions: Any, times: Any = None) -> torch.Tensor:
        del times
        return 1000.0 * ((positions - torch.from_numpy(MIDDLE)).norm(dim=-1, keepdim=True) < RADIUS)

    def together(several: Any) -> list[Any]:
        places = [one.frustums.get_positions() for one in several]
        up = [(place[..., 2:] > float(MIDDLE[2])).float() for place in places]
        colours = [torch.cat([high, torch.zeros_like(high), 1 - high], -1) for high in up]
        return [
            {FieldHeadNames.DENSITY: density(place), FieldHeadNames.RGB: colour}
            for place, colour in zip(places, colours, strict=True)
        ]

    cell.field.together = together
    for network in cell.proposal_networks:
        network.density_fn = density


def _mesh(world: World, run: Path, work: Meshing, lens: bool = False) -> None:
    set_world(world)
    (checkpoint,) = (run.parent / "nerfstudio_models").glob("*.ckpt")
    config = read_config(run)
    pipeline: Any = load_model(config, checkpoint, world, work.test_mode)
    for cell in pipeline.model.cells.values():
        _ball(cell)
    if lens:
        pipeline.datamanager.train_dataset.cameras.camera_type.fill_(CameraType.FISHEYE.value)
    work.run(config, checkpoint, pipeline)
    set_world(None)


def _vertices(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return vertices seen from the ball's middle, and their colours."""
    mesh = pytest.importorskip("open3d").io.read_triangle_mesh(str(path))
    return np.asarray(mesh.vertices) - MIDDLE, np.asarray(mesh.vertex_colors)


def test_the_mesh_of_a_ball_is_its_surface(tmp_path: Path) -> None:
    """Of two cells, by either depth, on one rank and on two; through pinhole cameras, whatever the lens was."""
    pytest.importorskip("open3d")
    samples = {"num_proposal_samples_per_ray": (128, 64), "num_nerf_samples_per_ray": 32}
    run = write_run(tmp_path, cells=2, **samples)
    work = Meshing(tmp_path / "median.ply", max_depth=3.0, voxel=VOXEL, downscale=0.25)
    _mesh(World.single(), run, work)
    _mesh(World.single(), run, replace(work, output=tmp_path / "expected.ply", depth="expected"), lens=True)
    run_ranks(_mesh, 2, run, replace(work, output=tmp_path / "ranks.ply"))
    meshes = {name: _vertices(tmp_path / f"{name}.ply") for name in ("median", "expected", "ranks")}
    for vertices, colours in meshes.values():
        off = np.abs(np.linalg.norm(vertices, axis=1) - RADIUS)
        assert len(vertices) > 500 and off.mean() < VOXEL / 2 and off.max() < 1.5 * VOXEL
        assert vertices[:, 0].min() < -0.9 * RADIUS and vertices[:, 0].max() > 0.9 * RADIUS
        north, south = (colours[some].mean(0) for some in (vertices[:, 2] > 0.05, vertices[:, 2] < -0.05))
        assert north[0] > 0.95 > 0.05 > north[2] and south[2] > 0.95 > 0.05 > south[0]
    off, _ = KDTree(meshes["ranks"][0]).query(meshes["median"][0])
    assert len(meshes["ranks"][0]) == len(off) and off.max() < 1e-4


def test_meshes_are_of_depths_along_the_axes_of_pinhole_cameras(tmp_path: Path) -> None:
    """Fields render distances along rays, also through lenses."""
    eye = torch.eye(4)[None, :3]
    lens = Cameras(eye, 20.0, 25.0, 9.0, 8.0, 20, 16, torch.full((1, 6), 0.1), CameraType.FISHEYE)
    (camera,) = [Meshing(tmp_path / "a.ply")._request(lens).camera]
    assert camera is not None and camera.distortion_params is None
    assert int(camera.camera_type.item()) == CameraType.PERSPECTIVE.value
    far = torch.rand(16, 20, 1, generator=torch.Generator().manual_seed(2)) + 1
    outputs = {"rgb": far.expand(16, 20, 3), "accumulation": far / 2, "depth": far, "expected_depth": 3 * far}
    pictures = FieldPictures(SimpleNamespace(device="cpu"))
    pictures.draw = lambda *_: outputs  # type: ignore[method-assign]
    cosines = -camera.generate_rays(0).directions[..., 2:]
    assert float(cosines.min()) < 0.9
    for median, times in ((True, 1), (False, 3)):
        pixels = pictures.surface(RenderRequest.of(camera), (0,), median=median)
        assert pixels is not None and pixels.depth is not None
        torch.testing.assert_close(pixels.depth, times * far * cosines)
        torch.testing.assert_close(pixels.color / pixels.alpha, outputs["rgb"])


def test_unsupported_requests_are_reported(run: Path, tmp_path: Path) -> None:
    def refused(work: Any, devices: int = 1) -> str:
        with pytest.raises(InputError) as caught:
            run_tool(run, None, work, devices, "cpu")
        return str(caught.value)

    try:
        evaluation = Evaluation(tmp_path / "a.json")
        assert f"--num-devices 4: {run.parent}" in (said := refused(evaluation, 4)) and "Use 3 devices or fewer" in said
        for name in ("rank", "background", "normals"):
            work = FilmRendering(Spiral(0.2, 10), tmp_path / "a", Look((name,)))
            assert f"--rendered-output-names {name}: there is no such output" in refused(work)
    finally:
        set_world(None)


def test_more_ranks_than_cells_are_refused_by_the_pipeline(run: Path) -> None:
    """As under torchrun, without an earlier count of ranks."""
    (checkpoint,) = (run.parent / "nerfstudio_models").glob("*.ckpt")
    config = read_config(run)
    pipeline: Any = load_model(config, checkpoint, World.single(), "inference")
    pipeline.world = type("", (), {"size": CELLS + 1})()
    with pytest.raises(InputError, match=rf"has {CELLS} cells, and each of the {CELLS + 1} workers"):
        pipeline.load_pipeline(torch.load(checkpoint, weights_only=False)["pipeline"], 1)
