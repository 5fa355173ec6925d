"""Image reader that removes lens distortion; camera parameters are known before an image is read."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, cast

import cv2
import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.datamanagers.full_images_datamanager import (
    _undistort_image,  # pyright: ignore[reportPrivateUsage]
)
from nerfstudio.data.datasets.base_dataset import InputDataset
from numpy.typing import NDArray
from torch import Tensor
from torchvision.io import decode_jpeg

from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import raise_together
from ns_multigpu.plugin.capture.image_files import COPY_AGAIN, is_damaged_jpeg, read_sky
from ns_multigpu.plugin.capture.image_store import ImageData
from ns_multigpu.plugin.capture.opencv_cameras import OpenCVCameras

ImageType = Literal["uint8", "float32"]

Pinhole = tuple[float, float, float, float, int, int]
"""fx, fy, cx, cy, width, height, in pixels."""

_TRACE = 1e-20
"""Distortion k1 of a lens without distortion: it bends no ray by as much as a number's rounding."""


class FileDataset(InputDataset):
    """nerfstudio's dataset of image files, which decodes JPEG to the same pixels without Python's lock.

    PIL releases the lock while it decodes, but not while it copies the pixels to an array. Many threads wait for that.
    """

    def get_numpy_image(self, image_idx: int) -> NDArray[np.uint8]:
        """Return the image [H, W, 3 or 4] uint8, as nerfstudio does, with its errors."""
        if self.scale_factor == 1.0:
            with suppress(RuntimeError):  # of another format, CMYK, or damaged: PIL decodes it or says what is wrong
                data = np.fromfile(self._dataparser_outputs.image_filenames[image_idx], np.uint8)
                pixels = cast(Tensor, decode_jpeg(torch.from_numpy(data)))
                if is_damaged_jpeg(data):
                    raise ValueError(f"its pixels are damaged; {COPY_AGAIN}")
                return pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
        return super().get_numpy_image(image_idx)


class ImageReader:
    """Reader of a dataset's images: undistorted to a pinhole camera, or unchanged (`lens`).

    Nerfstudio computes the undistorted cameras while it undistorts the images. Here they are computed first, from the
    lenses alone, so images can be read on demand. Every rank creates one, together.

    Args:
        dataset: the images; its cameras are those of the files.
        kind: data type of the images in memory.
        world: the ranks.
        lens: True to keep the distortion, for rendering through the lens.
        sky: masks of the sky, a file for each image; None to read none.

    Attributes:
        cameras: cameras of the returned images, for rendering.

    Raises:
        InputError: undistortion leaves no image; the message names the views.
    """

    def __init__(
        self, dataset: InputDataset, kind: ImageType, world: World, *, lens: bool = False,
        sky: Sequence[Path] | None = None,
    ) -> None:  # fmt: skip
        self._dataset, self._sky = dataset, sky
        self._kind: ImageType = kind
        # A copy: the dataset's own cameras become pinhole cameras later.
        self._lenses = deepcopy(dataset.cameras)
        self._distorted = [False] * len(self._lenses) if lens else _distorted(self._lenses)
        self.cameras = self._pinholes(world)

    def read(self, index: int) -> ImageData:
        """Read an image, and its mask if it has one, on the host. Several threads call it.

        Raises:
            ValueError: the image is unreadable or does not fit its camera; the message names the file.
        """
        try:
            return self._read(index)
        except Exception as error:  # PIL's plugins raise any exception type for damaged files
            raise ValueError(f"{self._dataset.image_filenames[index]}: {error}") from error

    def _read(self, index: int) -> ImageData:
        dataset = self._dataset
        quantise = self._kind == "uint8" and bool(dataset.mask_color)  # nerfstudio paints with floats in [0, 1]
        data = dataset.get_data(index, image_type="float32" if quantise else self._kind)
        if quantise:
            data["image"] = (data["image"] * 255).round().to(torch.uint8)
        kept: ImageData = {"image": data["image"]}
        if self._sky is not None:
            height, width = data["image"].shape[:2]
            sky = torch.from_numpy(read_sky(self._sky[index], (width, height)))[..., None]
            data["mask"] = torch.cat([data.get("mask", torch.ones_like(sky)), sky], dim=2)
        if "mask" in data:
            kept["mask"] = _apart(data["mask"])
        if not self._distorted[index]:
            return kept
        camera = self._lenses[index].reshape(())
        image = data["image"].numpy()
        size, found = (int(camera.width.item()), int(camera.height.item())), (image.shape[1], image.shape[0])
        if size != found:
            raise ValueError(f"the image has {found[0]}x{found[1]} pixels, its camera {size[0]}x{size[1]}")
        _, image, mask = _undistorted(camera, data, image)
        kept["image"] = torch.from_numpy(np.ascontiguousarray(image))
        if mask is not None:
            kept["mask"] = _apart(mask.contiguous())
        return kept

    def masks(self, index: int) -> int:
        """Return the channels of an image's mask: of a file, or the border of a fisheye's circle; and of the sky."""
        if self._sky is not None:
            return 2
        circle = int(self._lenses.camera_type[index].item()) == CameraType.FISHEYE624.value and self._distorted[index]
        return int(self._dataset._dataparser_outputs.mask_filenames is not None or circle)  # pyright: ignore

    def _pinholes(self, world: World) -> Cameras:
        """Compute the cameras of the undistorted images, once per lens, with the lenses distributed over the ranks."""
        lenses: dict[tuple[float, ...], list[int]] = {}
        for index, key in enumerate(_keys(self._lenses)):
            if self._distorted[index]:
                lenses.setdefault(key, []).append(index)
        views = [group[0] for group in lenses.values()][world.rank :: world.size]
        with ThreadPoolExecutor(4) as pool:
            mine = dict(zip(views, pool.map(self._pinhole, views), strict=True))
        table: dict[int, Pinhole] = {}
        for part in all_gather_objects(mine, world):
            table.update(part)
        cameras = deepcopy(self._lenses)
        columns = [getattr(cameras, name).clone() for name in ("fx", "fy", "cx", "cy", "width", "height")]
        problems: list[str] = []
        for group in lenses.values():
            pinhole = table[group[0]]
            if not np.isfinite(pinhole).all() or min(pinhole[0], pinhole[1]) <= 0 or min(pinhole[4:]) < 1:
                problems += [str(self._dataset.image_filenames[index]) for index in group]
            for column, value in zip(columns, pinhole, strict=True):
                column[group] = value
        raise_together(problems, world, "Taking the lens distortion out leaves nothing of {count} image(s):")
        cameras.fx, cameras.fy, cameras.cx, cameras.cy, cameras.width, cameras.height = columns
        if lenses and cameras.distortion_params is not None:
            cameras.distortion_params = torch.zeros_like(cameras.distortion_params)
        return cameras

    def _pinhole(self, index: int) -> Pinhole:
        camera = self._lenses[index].reshape(())
        blank = np.zeros((int(camera.height.item()), int(camera.width.item())), np.uint8)
        K, image, _ = _undistorted(camera, {}, blank)
        height, width = image.shape[:2]
        return float(K[0, 0]), float(K[1, 1]), float(K[0, 2]), float(K[1, 2]), width, height


def _apart(mask: Tensor) -> Tensor:
    """Return a mask with sky taken out of the pixels that train colours, and masked pixels out of the sky."""
    if mask.shape[2] == 1:
        return mask
    kept, sky = mask.split(1, dim=2)
    return torch.cat([kept & ~sky, kept & sky], dim=2)


def through_lenses(cameras: Cameras) -> Cameras:
    """Return cameras that are drawn through their lenses: if one has distortion, each has a parameter other than 0.

    All views of a step have lenses, or none has.
    """
    if not any(_distorted(cameras)):
        return cameras
    given = cameras.distortion_params
    params = torch.zeros(len(cameras), 6) if given is None else given.clone()
    params[~params.any(dim=-1), 0] = _TRACE
    result = deepcopy(cameras)
    result.distortion_params = params
    return result


def _distorted(cameras: Cameras) -> list[bool]:
    """Return True for each camera with distortion to remove: a fisheye's is there without parameters, too."""
    fisheyes = torch.tensor([CameraType.FISHEYE.value, CameraType.FISHEYE624.value])
    bent = torch.isin(cameras.camera_type.reshape(-1).cpu(), fisheyes)
    if cameras.distortion_params is not None:
        bent = bent | (cameras.distortion_params != 0).any(dim=-1)
    return bent.tolist()


def _keys(cameras: Cameras) -> list[tuple[float, ...]]:
    columns = [cameras.camera_type, cameras.fx, cameras.fy, cameras.cx, cameras.cy, cameras.width, cameras.height]
    if cameras.distortion_params is not None:
        columns.append(cameras.distortion_params)
    return [tuple(row) for row in torch.cat([column.double() for column in columns], dim=-1).tolist()]


def _undistorted(
    camera: Cameras, data: ImageData, image: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], Tensor | None]:
    """Return nerfstudio's matrix [3, 3], image and mask without distortion; it knows no `OpenCVCameras`."""
    params, K = camera.distortion_params, camera.get_intrinsics_matrices().numpy().copy()
    given = np.zeros(6) if params is None else params.numpy().copy()
    if not isinstance(camera, OpenCVCameras):
        return _undistort_image(camera, given, data, image, K)
    given = given[[0, 1, 4, 5, 2, 3, 6, 7]]
    K[:2, 2] -= 0.5  # OpenCV's pixels have whole numbers at their centres
    new, (x, y, width, height) = cv2.getOptimalNewCameraMatrix(K, given, image.shape[1::-1], 0)

    def flat(pixels: NDArray[Any]) -> NDArray[Any]:
        """Return pixels without distortion, cut to those that all have a value."""
        return cv2.undistort(pixels, K, given, None, new)[y : y + height, x : x + width]

    image, mask = flat(image), data.get("mask")
    if mask is not None:
        mask = torch.from_numpy(flat(mask.numpy().astype(np.uint8) * 255)).bool().reshape(height, width, -1)
    new[:2, 2] += [0.5 - x, 0.5 - y]
    return new, image, mask
