"""Frames on all devices: in order, whatever is interrupted, and as nerfstudio's own commands write them."""

import errno
import json
import math
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.utils.colormaps import ColormapOptions
from PIL import Image

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError, SaveFailed
from ns_multigpu.plugin.render.panorama import panorama
from ns_multigpu.plugin.tools import film, models
from ns_multigpu.plugin.tools.film import part_length
from ns_multigpu.plugin.tools.frames import Look, with_even_sides
from ns_multigpu.plugin.tools.models import run_tool
from ns_multigpu.plugin.tools.rendering import FilmRendering
from ns_multigpu.plugin.tools.shots import CameraPath, Dataset, Interpolated, Spiral
from tests.lib.ranks import run_ranks
from tests.lib.rendering import camera, make_pipeline
from tests.lib.trained_run import render_run, write_path, write_run

FRAMES = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def path(run: Path) -> Path:
    return write_path(run.parent / "path.json", FRAMES)


def _frames(video: Path) -> np.ndarray[Any, Any]:
    return np.stack(list(iio.imiter(video)))


@pytest.fixture(scope="module")
def images(run: Path, path: Path) -> np.ndarray[Any, Any]:
    """Return all frames, by one process."""
    folder = run.parent / "images"
    drawn = render_run(World.single(), run, FilmRendering(CameraPath(path), folder, image_format="png"), True)
    assert drawn == [f"{n:05d}" for n in range(FRAMES)]
    assert not (folder / film.JOB).exists() and len(list(folder.iterdir())) == FRAMES
    made = np.stack([np.asarray(Image.open(folder / f"{n:05d}.png")) for n in range(FRAMES)])
    assert made.shape == (FRAMES, 34, 50, 3) and float(np.abs(np.diff(made.astype(float), axis=0)).mean()) > 0.3
    return made


@pytest.mark.parametrize(("size", "whole"), [(1, True), (2, True), (2, False), (3, True)])
def test_a_film_has_all_frames_in_order(
    run: Path, path: Path, images: np.ndarray[Any, Any], tmp_path: Path, size: int, whole: bool
) -> None:
    video = tmp_path / "films" / "a.mp4"
    drawn = run_ranks(render_run, size, run, FilmRendering(CameraPath(path), video), whole)
    names = sorted(name for one in drawn for name in one)
    assert names == sorted([f"{n:05d}" for n in range(FRAMES)] * (1 if whole else size)), "no frame is drawn twice"
    assert not whole or size == 3 or all(drawn), "every rank draws"
    found = _frames(video)
    assert found.shape == images.shape and [file.name for file in video.parent.iterdir()] == ["a.mp4"]
    error = np.abs(found.astype(float) - images).mean((1, 2, 3))
    assert error.max() < 4.0, error
    for other in (np.roll(images, 1, 0), images[::-1]):
        assert np.abs(found.astype(float) - other).mean() > 1.02 * error.mean(), "frames differ by their order"


def test_parts_have_equal_shares() -> None:
    assert [part_length(frames) for frames in (1, 90, 300, 9000)] == [8, 8, 18, 32]


class _Full:
    """A disk that takes so many files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: int) -> None:
        self.left, usual, several = files, os.replace, threading.Lock()

        def replace(source: Any, target: Any) -> None:
            if str(target).endswith((".png", ".mp4")):
                with several:
                    if self.left == 0:
                        raise OSError(errno.ENOSPC, "No space left on device")
                    self.left -= 1
            usual(source, target)

        monkeypatch.setattr(Path, "replace", lambda part, target: replace(part, target))


@pytest.mark.parametrize("kind", ["film", "images"])
def test_full_disk_keeps_frames_and_rendering_resumes(
    run: Path, path: Path, images: np.ndarray[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    output = tmp_path / ("a.mp4" if kind == "film" else "a")
    work = FilmRendering(CameraPath(path), output, image_format="png")
    folder = tmp_path / "a.mp4.parts" if kind == "film" else output
    with monkeypatch.context() as patch:
        _Full(patch, 1 if kind == "film" else 5)
        with pytest.raises(SaveFailed, match=r"No space left on device. Finished frames are kept.*goes on from there"):
            render_run(World.single(), run, work, True)
    kept = {file: file.stat().st_mtime_ns for file in folder.glob("[0-9]*")}
    assert len(kept) == (1 if kind == "film" else 5) and not output.is_file()
    assert not list(tmp_path.rglob("*.part*.*")), "nothing is being written any more"
    drawn = render_run(World.single(), run, work, True)
    per_file = part_length(FRAMES) if kind == "film" else 1
    assert len(drawn) == FRAMES - per_file * len(kept), "what was written is not drawn again"
    if kind == "film":
        assert np.abs(_frames(output).astype(float) - images).mean() < 4.0 and not folder.exists()
    else:
        assert all(file.stat().st_mtime_ns == before for file, before in kept.items())
        assert len(list(output.glob("*.png"))) == FRAMES


@pytest.mark.parametrize("other", [{"look": Look(("depth",))}, {"nearest": True}, {"jpeg_quality": 90}])
def test_another_render_does_not_reuse_interrupted_frames(
    run: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    output = tmp_path / "a"
    output.mkdir()
    (output / "00019.png").write_text("somebody's")
    (output / "00033.png").write_text("somebody's")
    with monkeypatch.context() as patch:
        _Full(patch, 5)
        with pytest.raises(SaveFailed):
            render_run(World.single(), run, FilmRendering(CameraPath(path), output, image_format="png"), True)
    work = FilmRendering(CameraPath(path), output, image_format="png", **other)
    assert len(render_run(World.single(), run, work, True)) == FRAMES
    assert (output / "00033.png").read_text() == "somebody's", "what is not of the render stays"
    assert Image.open(output / "00019.png").height == 34


def _theirs(run: Path, mode: str, output: Path, **options: Any) -> None:
    from nerfstudio.scripts import render

    kind = {"interpolate": render.RenderInterpolated, "spiral": render.SpiralRender, "dataset": render.DatasetRender}
    kind[mode](load_config=run, output_path=output, image_format="png", **options).main()


@pytest.mark.parametrize("mode", ["interpolate", "spiral", "dataset"])
def test_a_mode_writes_what_ns_render_writes(
    run: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    what: Any = {"interpolate": Interpolated("eval", 2), "spiral": Spiral(0.25, 12), "dataset": Dataset("test")}[mode]
    given: dict[str, Any] = {
        "interpolate": {"interpolation_steps": 2, "output_format": "images"},
        "spiral": {"seconds": 0.25, "frame_rate": 12, "output_format": "images"},
        "dataset": {},
    }[mode]
    _theirs(run, mode, tmp_path / "theirs", **given)
    look = Look(()) if mode == "dataset" else Look()
    run_ranks(render_run, 2, run, FilmRendering(what, tmp_path / "ours", look, image_format="png"), True)
    names = sorted(str(file.relative_to(tmp_path / "theirs")) for file in (tmp_path / "theirs").rglob("*.png"))
    assert names == sorted(str(file.relative_to(tmp_path / "ours")) for file in (tmp_path / "ours").rglob("*.png"))
    assert len(names) == {"interpolate": 8, "spiral": 3, "dataset": 25}[mode]
    for name in names:
        ours, theirs = (np.asarray(Image.open(tmp_path / one / name)).astype(int) for one in ("ours", "theirs"))
        limit = 6 if "depth" in name else 1  # a step in the colours of depth
        assert np.abs(ours - theirs).max() <= limit, name


def test_raw_numbers_of_a_dataset(run: Path, tmp_path: Path) -> None:
    import gzip

    work = FilmRendering(Dataset("test"), tmp_path, Look(("raw-depth", "raw-gt-rgb")))
    render_run(World.single(), run, work, True)
    files = sorted(tmp_path.rglob("*.npy.gz"))
    assert len(files) == 10 and {file.parent.name for file in files} == {"raw-depth", "raw-gt-rgb"}
    with gzip.open(files[0]) as file:
        assert np.load(file).dtype == np.float32


def test_colours_of_choice_are_those_of_ns_render(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    colors = ColormapOptions("magma", normalize=True, colormap_min=0.2, colormap_max=0.9, invert=True)
    names = ["depth", "accumulation"]
    given: dict[str, Any] = {"seconds": 0.25, "frame_rate": 12, "output_format": "images"}
    _theirs(run, "spiral", tmp_path / "theirs", **given, rendered_output_names=names, colormap_options=colors)
    work = FilmRendering(Spiral(0.25, 12), tmp_path / "ours", Look(tuple(names), colors=colors), image_format="png")
    render_run(World.single(), run, work, True)
    for name in ("00000", "00002"):
        ours, theirs = (np.asarray(Image.open(tmp_path / f"{one}/{name}.png")) for one in ("ours", "theirs"))
        assert np.abs(ours.astype(int) - theirs).max() <= 6


# ---- panoramas ----


def _spin(angle: float) -> torch.Tensor:
    """Return a turn to the left and right."""
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])


def test_a_panorama_shows_what_pinholes_show(tmp_path: Path) -> None:
    """Each way that a pinhole camera looks, a panorama of the same place has the same colour and the same distance."""
    from tests.lib.rendering import write_capture

    pipeline = make_pipeline(World.single(), write_capture(tmp_path / "tiny"), "single", background_color="white")
    pipeline.eval()
    place = camera(64, 64)
    # It looks past the scene, which lies on the edge between two faces.
    turned, at = place.camera_to_worlds[0, :, :3] @ _spin(0.75), torch.tensor([[2.0], [0.1], [0.5]])
    place.camera_to_worlds = torch.cat([turned, at], 1)[None]
    around = Cameras(
        place.camera_to_worlds, torch.tensor([[128.0]]), torch.tensor([[128.0]]), torch.tensor([[128.0]]),
        torch.tensor([[64.0]]), width=256, height=128, camera_type=CameraType.EQUIRECTANGULAR,
    )  # fmt: skip
    outputs = panorama(around, pipeline.renders.render)
    assert (
        outputs is not None and outputs["rgb"].shape == (128, 256, 3) and outputs["background"].shape == (128, 256, 3)
    )
    rays = around.generate_rays(camera_indices=0).directions.reshape(128, 256, 3)
    compared = 0
    for turn in (-0.75, -0.6, 0.0, 2.0):
        spin = _spin(turn)
        view = camera(96, 96)
        view.camera_to_worlds = torch.cat(
            [place.camera_to_worlds[0, :, :3] @ spin, place.camera_to_worlds[0, :, 3:]], 1
        )[None]
        flat = pipeline.renders.render(view)
        assert flat is not None
        local = rays @ view.camera_to_worlds[0, :, :3]
        x, y = (48 + 48 * local[..., 0] / -local[..., 2]), (48 - 48 * local[..., 1] / -local[..., 2])
        inside = (local[..., 2] < -0.75) & (x > 8) & (x < 88) & (y > 8) & (y < 88)
        column, row = x[inside].long(), y[inside].long()
        error = (flat["rgb"][row, column] - outputs["rgb"][inside]).abs().mean(-1)
        assert float(error.mean()) < 0.03 and float(error.quantile(0.95)) < 0.15, turn
        solid = (flat["accumulation"][row, column] > 0.8)[:, 0] & (outputs["accumulation"][inside] > 0.8)[:, 0]
        distance = flat["depth"][row, column][solid] / -local[inside][solid][:, 2:]
        compared += int(solid.sum())
        assert not len(distance) or float((distance / outputs["depth"][inside][solid] - 1).abs().median()) < 0.05
    assert compared > 200 and float(outputs["rgb"].std()) > 0.05


def test_panoramic_film_has_its_metadata(run: Path, tmp_path: Path) -> None:
    path_file = write_path(
        tmp_path / "path.json", 2, camera_type="equirectangular", render_width=64, render_height=32, crop=None
    )
    work = FilmRendering(CameraPath(path_file), tmp_path / "a.mp4")
    assert work.what.check() == (64, 32)  # type: ignore[union-attr]
    run_ranks(render_run, 2, run, work, False)
    assert _frames(tmp_path / "a.mp4").shape == (2, 32, 64, 3)
    assert b"<GSpherical:ProjectionType>equirectangular" in (tmp_path / "a.mp4").read_bytes()


def test_odd_sides_repeat_the_last_pixels(run: Path, path: Path, tmp_path: Path) -> None:
    """Players want yuv420p, which has even sides."""
    for output in (tmp_path / "a.mp4", tmp_path / "a"):
        render_run(
            World.single(), run, FilmRendering(CameraPath(path), output, image_format="png", downscale=2.0), True
        )
    found, image = _frames(tmp_path / "a.mp4"), np.asarray(Image.open(tmp_path / "a" / "00000.png"))
    assert image.shape == (17, 25, 3) and found.shape == (FRAMES, 18, 26, 3)
    assert iio.immeta(tmp_path / "a.mp4")["pix_fmt"].startswith("yuv420p")
    expected = np.pad(image, ((0, 1), (0, 1), (0, 0)), "edge")
    assert np.abs(found[0].astype(float) - expected).mean() < 6.0
    even = with_even_sides(torch.arange(24).view(4, 3, 2))
    assert even.shape == (4, 4, 2) and torch.equal(even[:, 3], even[:, 2])
    assert torch.equal(with_even_sides(even), even)


def test_only_films_need_ffmpeg(run: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    images = FilmRendering(CameraPath(path), tmp_path / "a", image_format="png")
    images.check()
    assert len(render_run(World.single(), run, images, True)) == FRAMES == len(list((tmp_path / "a").glob("*.png")))
    monkeypatch.setattr(models, "load_model", None)
    with pytest.raises(InputError, match=r"needs ffmpeg, .*: pip install imageio-ffmpeg. .* the name of a folder"):
        run_tool(run, None, FilmRendering(CameraPath(path), tmp_path / "a.mp4"), 1, "cpu")
    assert not (tmp_path / "a.mp4.parts").exists()


def test_existing_output_is_replaced_on_request_only(path: Path, tmp_path: Path) -> None:
    video, folder = tmp_path / "a.mp4", tmp_path / "a"
    for output, file, said in ((video, video, "a.mp4 exists already"), (folder, folder / "0.jpg", "a has files")):
        work = FilmRendering(CameraPath(path), output)
        work.check()
        file.touch()
        with pytest.raises(InputError, match=rf"{said}.*another name, or --overwrite"):
            work.check()
        replace(work, overwrite=True).check()
    (folder / film.JOB).touch()
    FilmRendering(CameraPath(path), folder).check()  # an interrupted render resumes


# ---- what cannot be done ----


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"render_width": 0}, "render_width is 0. Give a whole number of pixels, at least 1"),
        ({"render_height": 3.5}, "render_height is 3.5"),
        ({"render_height": None}, "render_height is None"),
        ({"camera_type": "omnidirectional"}, "camera_type is 'omnidirectional'. Models are rendered as perspective"),
        ({"camera_type": "nonsense"}, "camera_type is 'nonsense'"),
        ({"seconds": 0}, "seconds is 0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"camera_path": []}, "camera_path has no cameras"),
        ({"camera_path": [{"fov": 60}]}, "camera 0 has no camera_to_world of 16 numbers"),
        ({"camera_path": [{"camera_to_world": [float("nan")] * 16, "fov": 60}]}, "not a finite number"),
        ({"camera_path": [{"camera_to_world": [1.0] * 16, "fov": 180}]}, "camera 0 has a fov of 180"),
        ({"crop": {"crop_center": [0, 0]}}, "the crop's crop_center is [0, 0]. Give three numbers"),
    ],
)
def test_a_camera_path_that_cannot_be_rendered(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match="--camera-path-filename") as caught:
        FilmRendering(CameraPath(write_path(tmp_path / "path.json", 1, **change)), tmp_path / "x").check()
    assert said in str(caught.value)


def test_other_things_that_cannot_be_rendered(run: Path, path: Path, tmp_path: Path) -> None:
    def refused(what: Any, output: Path = tmp_path / "x", look: Look | None = None, **more: Any) -> str:
        with pytest.raises(InputError) as caught:
            work = FilmRendering(what, output, look or Look(), **more)
            work.check()
            render_run(World.single(), run, work, True)
        return str(caught.value)

    (tmp_path / "file").touch()
    along = CameraPath(path)
    assert "file/x cannot be written: Not a directory" in refused(along, tmp_path / "file" / "x")
    assert "give the name of an .mp4 file" in refused(along, tmp_path / "a.avi")
    assert "0x0 pixels" in refused(along, downscale=100.0)
    assert "--downscale-factor 0" in refused(along, downscale=0.0)
    assert "--jpeg-quality 0" in refused(along, jpeg_quality=0)
    assert "no such output; there are rgb, rgba, depth" in refused(along, look=Look(("colour",)))
    assert "spread over several devices" in refused(along, look=Look(("rank",)))
    assert "of photographs there are gt-rgb" in refused(Dataset(), look=Look(("gt-depth",)))
    assert "--render-nearest-camera: with --mode dataset" in refused(Dataset(), nearest=True)
    assert "--interpolation-steps 0" in refused(Interpolated(steps=0))
    assert "that is no frame" in refused(Spiral(seconds=0.01))
    assert "--radius 0" in refused(Spiral(radius=0.0))
    assert json.loads(path.read_text())["camera_type"] == "perspective"
