"""Rendering of frames on all devices.

If the model is replicated, each device renders its own frames: parts of a film, or images, are distributed round-robin.
If it is sharded, as a radiance field always is, all ranks render every frame together. They alternate in receiving and
writing it. In both cases a device renders the next frame while the last ones are encoded.
"""

import gzip
import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import mediapy
import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.model_components import renderers
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import track
from torch import Tensor

from ns_multigpu.core.dist.collectives import broadcast_object, max_int
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError, whole_file
from ns_multigpu.plugin.render.panorama import panorama
from ns_multigpu.plugin.render.service import Outputs, RenderRequest
from ns_multigpu.plugin.tools.film import (
    JOB,
    Failed,
    FilmParts,
    ImageFormat,
    Images,
    begin,
    encoders,
    ffmpeg,
    is_done,
    part_length,
    put_together,
)  # fmt: skip
from ns_multigpu.plugin.tools.frames import HostFrame, Look, check_names, picture, shown, with_even_sides
from ns_multigpu.plugin.tools.nearest import fitted, width_next_to, with_nearest
from ns_multigpu.plugin.tools.shots import CameraPath, Dataset, Interpolated, Shot, Shots, Spiral, is_panorama


@dataclass(frozen=True)
class FilmRendering:
    """Frames to render, as ns-render does.

    Attributes:
        what: the cameras.
        output: a video, or a folder for images if the name has no suffix; for a `Dataset` always a folder.
        look: display options; without names all outputs of a `Dataset` are written, and the photographs.
        downscale: render at 1/downscale of the cameras' size.
        image_format: of images.
        jpeg_quality: of JPEG images, 1 to 100.
        nearest: show the nearest training photograph next to each frame. Not for a `Dataset`.
        overwrite: replace a finished video, or write into a folder that is not empty.
    """

    what: CameraPath | Interpolated | Spiral | Dataset
    output: Path
    look: Look = field(default_factory=Look)
    downscale: float = 1.0
    image_format: ImageFormat = "jpeg"
    jpeg_quality: int = 100
    nearest: bool = False
    overwrite: bool = False

    @property
    def test_mode(self) -> Literal["test", "inference"]:
        """Pipeline's test mode."""
        return self.what.test_mode

    @property
    def film(self) -> bool:
        """True if a film is written, not images."""
        return self.output.suffix != "" and not isinstance(self.what, Dataset)

    def check(self) -> None:
        """Check the options, before a model is loaded.

        Raises:
            InputError: an option is invalid.
        """
        self.what.check()
        if not self.downscale > 0:
            raise InputError(f"--downscale-factor {self.downscale}: give more than 0.")
        if not 1 <= self.jpeg_quality <= 100:
            raise InputError(f"--jpeg-quality {self.jpeg_quality}: give 1 to 100.")
        if self.film and self.output.suffix != ".mp4":
            raise InputError(f"--output-path {self.output}: give the name of an .mp4 file, or of a folder for images.")
        if self.film:
            ffmpeg()
        if self.nearest and isinstance(self.what, Dataset):
            raise InputError(
                "--render-nearest-camera: with --mode dataset frames are the capture's own views. Name gt-rgb among "
                "--rendered-output-names to have their photographs."
            )
        folder = self.output.parent if self.film else self.output
        if not self.overwrite and self._is_written():
            held = "exists already" if self.film else "has files already"
            raise InputError(f"--output-path {self.output} {held}: give another name, or --overwrite.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with whole_file(folder / ".probe") as probe:
                probe.touch()
            (folder / ".probe").unlink()
        except OSError as error:
            raise InputError(
                f"--output-path {self.output} cannot be written: {error.strerror or error}. Choose another place."
            ) from error

    def _is_written(self) -> bool:
        """Return True if the output exists, and is not an interrupted render's."""
        if self.film or not self.output.is_dir():
            return self.output.is_file()
        return not (self.output / JOB).is_file() and any(self.output.glob("[!.]*"))

    def run(self, run: Any, checkpoint: Path, pipeline: Any) -> None:
        """Render the frames. Every rank calls it; see `tools.models.Work`."""
        if self.film:
            mediapy.set_ffmpeg(ffmpeg())
        pipeline.eval()
        shots = self.what.shots(pipeline)
        for shot in shots.frames:
            shot.camera.rescale_output_resolution(1.0 / self.downscale)
        self._check_sizes(shots)
        if note := pipeline.frames_note([shot.camera for shot in shots.frames]):
            CONSOLE.print(note, soft_wrap=True)
        if self.nearest:
            shots = with_nearest(shots, pipeline.datamanager.train_dataset)
        artist = _Artist(pipeline, shots)
        job = {
            "checkpoint": [str(checkpoint), checkpoint.stat().st_size, checkpoint.stat().st_mtime_ns],
            "cameras": _digest(shots), "look": asdict(self.look), "format": [self.image_format, self.jpeg_quality],
            "nearest": self.nearest,
        }  # fmt: skip
        if isinstance(self.what, Dataset):
            self._write_views(artist, job, float(pipeline.datamanager.train_dataparser_outputs.dataparser_scale))
        elif self.film:
            check_names(self.look.names, artist.outputs)
            self._write_film(artist, job)
        else:
            check_names(self.look.names, artist.outputs)
            self._write_images(artist, job)

    def _check_sizes(self, shots: Shots) -> None:
        for shot in shots.frames:
            width, height = int(shot.camera.width.item()), int(shot.camera.height.item())
            if width < 1 or height < 1:
                raise InputError(f"--downscale-factor {self.downscale}: frames would have {width}x{height} pixels.")
            for name in self.look.names if is_panorama(shot.camera) else ():
                if name in ("rank", "normals"):
                    raise InputError(f"--rendered-output-names {name}: panoramas have no such output.")

    def _shown(self, outputs: Outputs, shot: Shot, artist: "_Artist") -> Tensor:
        frame = shown(outputs, self.look)
        if not self.nearest or shot.image is None:
            return frame
        height = frame.shape[0]
        photograph = fitted(shot.image(), width_next_to(artist.dataset, height), height).to(frame.device)
        opaque = photograph.new_full((*photograph.shape[:2], frame.shape[2] - 3), 255)
        return torch.cat([frame, torch.cat([photograph, opaque], 2)], 1)

    def _write_film(self, artist: "_Artist", job: dict[str, Any]) -> None:
        frames, world = artist.shots.frames, artist.world
        assert artist.shots.seconds is not None
        rate = len(frames) / artist.shots.seconds
        folder = self.output.with_name(self.output.name + ".parts")
        length = part_length(len(frames))
        began = begin(folder, {**job, "rate": rate, "length": length}) if world.is_main else 0
        _meet(world)
        parts = FilmParts(folder, rate, encoders(world.size // world.machines))
        units = [range(first, min(first + length, len(frames))) for first in range(0, len(frames), length)]
        for number, mine in artist.deal(units, lambda number: not is_done(parts.path(number), began)):
            for index in units[number]:
                outputs = artist.draw(frames[index], mine, "rank" in self.look.names)
                if outputs is not None:
                    parts.put(number, HostFrame(with_even_sides(self._shown(outputs, frames[index], artist))))
            if mine:
                parts.put(number, None)
        parts.finish()
        _meet(world)
        if world.is_main:
            put_together([parts.path(number) for number in range(len(units))], self.output)
            if frames and is_panorama(frames[0].camera):
                from nerfstudio.scripts.render import insert_spherical_metadata_into_file

                insert_spherical_metadata_into_file(self.output)
            shutil.rmtree(folder)
            CONSOLE.print(f"Video of {len(frames)} frames: {self.output}", soft_wrap=True)

    def _write_images(self, artist: "_Artist", job: dict[str, Any]) -> None:
        frames, world = artist.shots.frames, artist.world
        began = begin(self.output, job) if world.is_main else 0
        _meet(world)
        images = Images(self.output, self.image_format, self.jpeg_quality)
        for number, mine in artist.deal(frames, lambda number: not is_done(images.path(frames[number].name), began)):
            outputs = artist.draw(frames[number], mine, "rank" in self.look.names)
            if outputs is not None:
                images.put(frames[number].name, HostFrame(self._shown(outputs, frames[number], artist)))
        images.finish()
        _meet(world)
        if world.is_main:
            (self.output / JOB).unlink(missing_ok=True)
            CONSOLE.print(f"{len(frames)} images: {self.output}", soft_wrap=True)

    def _write_views(self, artist: "_Artist", job: dict[str, Any], scale: float) -> None:
        """Write each view's outputs, one folder per output; `raw-` ones as numbers, depth in the capture's units."""
        frames, world = artist.shots.frames, artist.world
        names = self.look.names or ("gt-rgb", *(name for name in artist.outputs if name not in ("rgba", "rank")))
        outputs_of = [name.removeprefix("raw-") for name in names if "gt-" not in name]
        if outputs_of:
            check_names(outputs_of, artist.outputs)
        for name in names:
            if "gt-" in name and name.removeprefix("raw-") != "gt-rgb":
                raise InputError(f"--rendered-output-names {name}: of photographs there are gt-rgb and raw-gt-rgb.")
        began = begin(self.output, {**job, "names": names}) if world.is_main else 0
        _meet(world)
        images = Images(self.output, self.image_format, self.jpeg_quality)

        def path(shot: Shot, name: str) -> Path:
            file = shot.name.format(name)
            return self.output / f"{file}.npy.gz" if name.startswith("raw-") else images.path(file)

        def lacking(number: int) -> bool:
            return not all(is_done(path(frames[number], name), began) for name in names)

        for number, mine in artist.deal(frames, lacking):
            shot = frames[number]
            outputs = artist.draw(shot, mine, "rank" in names)
            if outputs is None:
                continue
            for name in names:
                plain = name.removeprefix("raw-")
                there = {"gt-rgb": shot.image()} if plain == "gt-rgb" and shot.image is not None else outputs
                if name == plain:
                    image = there[name][..., :3] if name == "gt-rgb" else there.get(name)
                    frame = picture({**outputs, name: image} if image is not None else outputs, name, self.look)
                    images.put(shot.name.format(name), HostFrame(frame))
                else:
                    value = there[plain] / (scale if "depth" in plain else 1.0)
                    _write_numbers(path(shot, name), value.cpu().numpy())
        images.finish()
        _meet(world)
        if world.is_main:
            (self.output / JOB).unlink(missing_ok=True)
            CONSOLE.print(f"{len(frames)} views, each as {', '.join(names)}: {self.output}", soft_wrap=True)


class _Artist:
    """Renderer of frames, on one rank or on all together.

    Args:
        pipeline: with the model.
        shots: frames to render.

    Attributes:
        together: True if all ranks render every frame.
        outputs: names of the available outputs.
        dataset: the training views.
    """

    def __init__(self, pipeline: Any, shots: Shots) -> None:
        self.shots, self.world = shots, pipeline.world
        self.together: bool = pipeline.renders.shared
        pictures = pipeline.renders.pictures
        self.outputs: tuple[str, ...] = pictures.names
        self._pictures = pictures if self.together else pictures.alone()
        self._device = self.world.device
        self.dataset = pipeline.datamanager.train_dataset

    def deal(self, units: Sequence[Any], lacking: Callable[[int], bool]) -> Iterator[tuple[int, bool]]:
        """Yield the numbers of this rank's units, with True if this rank writes them. Existing units are skipped. Every
        rank iterates to the end.
        """
        world = self.world
        todo: list[int] = [number for number in range(len(units)) if lacking(number)] if world.is_main else []
        todo = broadcast_object(todo, 0, world)
        if world.is_main and len(todo) < len(units):
            CONSOLE.print(f"Going on: {len(units) - len(todo)} of {len(units)} parts are there already.")
        mine = [(unit, k % world.size == world.rank) for k, unit in enumerate(todo)]
        work: Iterable[tuple[int, bool]] = mine if self.together else [one for one in mine if one[1]]
        if world.is_main:
            work = track(list(work), "Rendering", console=CONSOLE, transient=True)
        yield from work

    def draw(self, shot: Shot, mine: bool, owners: bool) -> Outputs | None:
        """Return a frame's outputs on its writer; None on other ranks."""
        with self._background():
            roots = self._roots(mine)
            if is_panorama(shot.camera) and not self._pictures.draws_panoramas:
                return panorama(shot.camera, lambda face: self._draw(face, roots))
            outputs = self._draw(shot.camera, roots)
            if owners and self.together:
                seen = self._draw(shot.camera, roots, owners=True)
                if outputs is not None and seen is not None:
                    outputs["rank"] = seen["rgb"]
            return outputs

    def _background(self) -> AbstractContextManager[Any]:
        if self.shots.background is None:
            return nullcontext()
        return renderers.background_color_override_context(self.shots.background.to(self._device))

    def _roots(self, mine: bool) -> tuple[int, ...]:
        if not self.together:
            return (0,)  # of its own world of one rank
        return (max_int(self.world.rank if mine else -1, self.world),)

    def _draw(self, camera: Cameras, roots: tuple[int, ...], *, owners: bool = False) -> Outputs | None:
        request = RenderRequest.of(camera, self.shots.crop)
        return self._pictures.draw(replace(request, owners=owners), roots)


def _write_numbers(path: Path, value: Any) -> None:
    try:
        with whole_file(path) as part, gzip.open(part, "wb") as file:
            np.save(file, value)
    except OSError as error:
        raise Failed(path, error) from error


def _digest(shots: Shots) -> str:
    """Return a digest of the frames' cameras and of the crop box."""
    known = hashlib.sha256()
    for shot in shots.frames:
        camera = shot.camera
        for value in (camera.camera_to_worlds, camera.fx, camera.fy, camera.cx, camera.cy, camera.width, camera.height):
            known.update(value.cpu().numpy().tobytes())
        if camera.times is not None:
            known.update(camera.times.cpu().numpy().tobytes())
        known.update(shot.name.encode())
    for value in () if shots.crop is None else (shots.crop.R, shots.crop.T, shots.crop.S):
        known.update(torch.as_tensor(value).cpu().numpy().tobytes())
    known.update(repr(None if shots.background is None else shots.background.tolist()).encode())
    return known.hexdigest()


def _meet(world: World) -> None:
    """Wait for the other ranks, without a short timeout: they may need hours."""
    max_int(0, world)
