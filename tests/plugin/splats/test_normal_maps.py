"""Normal maps as observations: read in the axes of either convention, refused by name if bad, and counted in a run."""

import contextlib
import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from PIL import Image

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.normal_map_loss import normal_map_loss
from ns_multigpu.plugin.capture.checks import transforms_problems
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.model.surfaces import check_primitive, of_depth
from ns_multigpu.plugin.splats.normal_maps import in_front, read_normals, training_normals
from tests.lib.captures import read_by, transforms
from tests.lib.ranks import run_ranks
from tests.lib.reconstruction import HEIGHT, LENS, WIDTH, make_scene, write_images, write_model
from tests.lib.resuming import start
from tests.lib.training_run import TinyDataParserConfig, add_maps, facing_normals, write_capture
from tests.plugin.splats.test_depth_maps import parser_of

WEIGHT = 0.3


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Return a capture of nerfstudio's with a normal map for each view."""
    write_capture(tmp_path / "capture", wide=False)
    add_maps(tmp_path / "capture", "normal_file_path", facing_normals)
    return tmp_path / "capture"


def read(folder: Path, world: World | None = None) -> Any:
    outputs = read_by(TinyDataParserConfig(data=folder)).train_dataparser_outputs
    return training_normals(outputs, world or World.single())


def test_directions_are_those_of_the_maps_pixels_through_a_lens(tmp_path: Path) -> None:
    """Of a capture of COLMAP's, from its folder, for maps of half the photograph's size with a hole."""
    scene = make_scene(lens=LENS)
    write_model(tmp_path / "sparse/0", scene)
    write_images(tmp_path / "images", scene)
    for number, name in enumerate(scene.names):
        path = (tmp_path / "normals" / name).with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        values = facing_normals(number, (HEIGHT // 2, WIDTH // 2))
        values[3] = 0
        Image.fromarray(values).save(path)
    outputs = read_by(parser_of(tmp_path, depths_path=None)).train_dataparser_outputs
    found, end = training_normals(outputs, World.single()), 0
    rows, columns = (part.reshape(-1) for part in np.mgrid[: HEIGHT // 2, : WIDTH // 2])
    kept = rows != 3
    assert found.normals is not None
    for count, path in zip(found.counts, outputs.image_filenames, strict=True):
        number = next(i for i, name in enumerate(scene.names) if Path(name).name == path.name)
        own, end = slice(end, end + count), end + count
        at, _ = cv2.projectPoints(
            found.points[own].double().numpy(), np.zeros(3), np.zeros(3), scene.intrinsics, np.array(scene.lens)
        )
        np.testing.assert_allclose(at[:, 0], np.stack([columns, rows], axis=1)[kept] * 2 + 1, atol=5e-3)
        values = facing_normals(number, (HEIGHT // 2, WIDTH // 2)).reshape(-1, 3)[kept] / 127.5 - 1
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        np.testing.assert_allclose(found.normals[own].numpy(), values, atol=1e-5)
    assert end == len(found.points) == len(found.ids)


def read_on(world: World, folder: Path) -> Any:
    found = read(folder, world)
    return found.points, found.normals, list(found.counts)


def test_axes_are_found_and_every_rank_has_all(capture: Path, capsys: Any) -> None:
    points, normals, counts = read_on(World.single(), capture)
    assert "in OpenCV's axes" in capsys.readouterr().out
    for other_points, other_normals, others in run_ranks(read_on, 2, capture):
        assert others == counts and torch.equal(other_points, points) and torch.equal(other_normals, normals)
    for file in capture.glob("normal_file_path_*.png"):
        values = np.array(Image.open(file))
        Image.fromarray(np.stack([values[..., 0], 255 - values[..., 1], 255 - values[..., 2]], -1)).save(file)
    found = read(capture)
    assert "in OpenGL's axes" in capsys.readouterr().out
    torch.testing.assert_close(found.normals, normals, rtol=0, atol=1e-6)


def test_files_of_omnidata_and_of_sixteen_bits(tmp_path: Path) -> None:
    values = facing_normals(3)
    Image.fromarray(values).save(tmp_path / "a.png")
    cv2.imwrite(str(tmp_path / "b.png"), values[..., ::-1].astype(np.uint16) * 257)
    np.save(tmp_path / "c.npy", np.moveaxis(values / 255, -1, 0))
    Image.fromarray(np.dstack([values, values[..., 0]])).save(tmp_path / "d.png")
    for name in ("a.png", "b.png", "c.npy", "d.png"):
        np.testing.assert_allclose(read_normals(tmp_path / name), values / 127.5 - 1, atol=1e-6)


def spoil(values: Any) -> Any:
    return lambda file: Image.fromarray(values).save(file)


ZEROS, GREY = np.zeros((12, 14, 3), np.uint8), np.ones((12, 14), np.uint8)
WIDE = np.pad(facing_normals(0), ((0, 0), (0, 5), (0, 0)), mode="edge")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.unlink(), r"there is no such file.*Maps of any size"),
        (lambda file: file.write_bytes(b"no"), r"it is no picture: give red, green and blue.*8-bit png"),
        (spoil(GREY), r"it has the shape \[12, 14\]: give red, green and blue"),
        (spoil(WIDE), r"it has 19x12 pixels and its photograph 28x24: .*same aspect"),
        (spoil(ZEROS), r"it has no normals, as no colour.*leave out its view, or leave --pipeline"),
    ],
)
def test_bad_maps_are_named_before_training(capture: Path, change: Any, said: str) -> None:
    change(capture / "normal_file_path_2.png")
    with pytest.raises(InputError, match=rf"--pipeline.model.normal-map-loss: 1 problem.*\n .*path_2.png: {said}"):
        read(capture)


def test_captures_without_maps_and_maps_of_the_world_are_refused(capture: Path) -> None:
    for number, file in enumerate(sorted(capture.glob("normal_file_path_*.png"))):
        values = facing_normals(number)
        Image.fromarray(values if number % 2 else 255 - values).save(file)
    with pytest.raises(InputError, match=r"path_0.png: .*face the camera in OpenCV's axes.*in the axes of the camera"):
        read(capture)
    with transforms(capture) as meta:
        del meta["frames"][3]["normal_file_path"]
    (line,) = transforms_problems(capture)
    assert "1 of 9 frames have no normal_file_path (3.png first): give it to all or none" in line
    with transforms(capture) as meta:
        for frame in meta["frames"]:
            frame.pop("normal_file_path", None)
    with pytest.raises(InputError, match="the capture has none: give normal_file_path for each frame"):
        read(capture)


def test_cells_have_no_rendered_normals() -> None:
    for primitive in ("2dgs", "3dgs"):
        options: Any = SplatModelConfig(primitive=primitive, normal_loss=0.0, normal_map_loss=0.1)
        assert ("normal_map" in of_depth(options)) == (primitive == "3dgs")
        if primitive == "3dgs":
            check_primitive(options, "pixel")
            continue
        with pytest.raises(InputError, match=r"--pipeline.model.normal-map-loss 0.1: with the strategy pixel"):
            check_primitive(options, "pixel")
    with pytest.raises(InputError, match=r"--pipeline.model.normal-map-loss -1.*: give a weight of 0 or more"):
        check_primitive(SplatModelConfig(normal_map_loss=-1.0), "tile")


@pytest.mark.parametrize("primitive", ["2dgs", "3dgs"])
def test_a_run_has_the_loss_of_its_maps(capture: Path, tmp_path: Path, primitive: str) -> None:
    options: Any = {"normal_map_loss": WEIGHT, "camera_optimizer": CameraOptimizerConfig(mode="off")}
    trainer = start(World.single(), capture, tmp_path / "run", 1, 2, primitive=primitive, **options)
    pipeline: Any = trainer.pipeline
    pipeline.train()
    losses = pipeline.get_train_loss_dict(1)[1]
    views, drawn = pipeline.model.views, pipeline.model.rendering.pixels
    assert all(("normals" in pixels.extra) == (primitive == "2dgs") for pixels in drawn)
    expected = WEIGHT * sum(float(normal_map_loss(p, views[p.patch.view]).detach()) for p in drawn) / 2
    assert expected > 0.01 and float(losses["normal_map_loss"].detach()) == pytest.approx(expected)


def ball(outputs: Any, *, of_world: bool) -> None:
    """Give a capture seed points on a ball, and maps of its normals: with noise, in OpenCV's axes of the cameras or in
    the axes of the capture's world."""
    turn, scale = outputs.dataparser_transform.double(), outputs.dataparser_scale
    centre, radius = turn[:, 3] * scale, 0.6 * scale
    points = torch.randn(800, 3, generator=torch.Generator().manual_seed(2)).double()
    outputs.metadata["points3D_xyz"] = centre + radius * torch.nn.functional.normalize(points, dim=1)
    for view, file in enumerate(outputs.metadata["normals"]):
        rays = outputs.cameras[view].generate_rays(0)
        start, along = rays.origins.double() - centre, rays.directions.double()
        middle = (start * along).sum(-1, keepdim=True)
        there = middle**2 - (start**2).sum(-1, keepdim=True) + radius**2
        normals = (start + (-middle - there.clamp(min=0).sqrt()) * along) / radius
        noise = torch.randn(normals.shape, generator=torch.Generator().manual_seed(view)).double()
        normals = torch.nn.functional.normalize(normals + 0.15 * noise, dim=-1)
        flip = torch.tensor([1.0, -1.0, -1.0]).double()
        to_world = outputs.cameras.camera_to_worlds[view, :, :3].double() * flip
        normals = normals @ (turn[:, :3] if of_world else to_world)
        values = torch.where(there > 0, 127.5 * (normals + 1), 0.0)
        Image.fromarray(values.round().to(torch.uint8).numpy()).save(file)


def test_normals_of_the_world_are_warned_of_by_what_views_share(
    capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = read_by(TinyDataParserConfig(data=capture)).train_dataparser_outputs

    def said() -> str:
        with contextlib.suppress(InputError):  # these face neither camera; a plane on the ground would
            training_normals(outputs, World.single())
        return " ".join(capsys.readouterr().out.split())

    ball(outputs, of_world=False)
    assert "axes of the world" not in said()
    ball(outputs, of_world=True)
    assert "seem to be in the axes of the world" in said()
    assert sorted(run_ranks(warned_on, 4, outputs)) == [False, False, False, True], "one rank prints it, of all's views"
    outputs.metadata["points3D_xyz"] = outputs.metadata["points3D_xyz"][:10]
    assert "axes of the world" not in said(), "too few points to compare views"


def test_seed_points_behind_others_are_not_compared() -> None:
    places = np.stack(np.meshgrid(np.linspace(-1, 1, 64), np.linspace(-1, 1, 64)), -1).reshape(-1, 2)
    at = np.array([[0.3, -0.3], [0.301, -0.3], [0.3, -0.301], [-0.3, 0.3], [5.0, 0.0]])
    found = in_front(at, np.array([2.0, 2.05, 3.0, 3.0, 1.0]), places)
    assert found.tolist() == [True, True, False, True, False]


def warned_on(world: World, outputs: Any) -> bool:
    printed = io.StringIO()
    with pytest.raises(InputError), contextlib.redirect_stdout(printed):
        training_normals(outputs, world)
    return "axes of the world" in printed.getvalue()
