"""nerfstudio's COLMAP parser that reads a model once for both splits, and seed points fast. It has lists of
`listed_split`, an offset, and k4, k5 and k6 of lenses.

nerfstudio creates an object per point, for the training and the held-out views: 13 us a point. The result here is
bitwise the same, but points at one position are merged.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.data.dataparsers import colmap_dataparser
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParser, ColmapDataParserConfig
from nerfstudio.data.utils import colmap_parsing_utils
from nerfstudio.process_data.colmap_utils import parse_colmap_camera_params
from numpy.typing import NDArray
from torch import Tensor

from ns_multigpu.plugin.capture.colmap import Damaged, gather, names_in_text, point_starts
from ns_multigpu.plugin.capture.coordinate_offset import Offset, offset_for, replaced, shifted
from ns_multigpu.plugin.capture.image_files import FRAME_FILES, add_frame_files
from ns_multigpu.plugin.capture.opencv_cameras import opencv_cameras
from ns_multigpu.plugin.capture.seed_points import merged
from ns_multigpu.plugin.capture.split_lists import listed_split

_POINT = np.dtype([("id", "<u8"), ("xyz", "<f8", 3), ("rgb", "u1", 3), ("error", "<f8"), ("track", "<u8")])
"""Fields before a point's track, https://colmap.github.io/format.html."""
_K4 = 3
"""Column of k4 in nerfstudio's distortion parameters: k1, k2, k3, k4, p1, p2."""


class QuickColmap(ColmapDataParser):
    """COLMAP parser of the module. nerfstudio's reader is used for text files, or if the points' views are
    requested.

    Args:
        config: nerfstudio's.
        offset: see `OffsetOption`.
    """

    _read: tuple[Path, bytes, float, dict[str, Tensor]] | None = None
    _model: tuple[Path, dict[str, Any]] | None = None
    _last: Tensor
    """[views, 3] k4, k5, k6 of each view of the model, and then of the split."""

    def __init__(self, config: ColmapDataParserConfig, offset: Offset | None = None) -> None:
        super().__init__(config)
        self._given_offset, self.offset = offset, np.zeros(3)

    def _generate_dataparser_outputs(self, split: str = "train", **kwargs: Any) -> DataparserOutputs:
        outputs = super()._generate_dataparser_outputs(split, **kwargs)
        parameters = outputs.cameras.distortion_params
        assert parameters is not None
        parameters[:, _K4] = self._last[:, 0]
        outputs.cameras = opencv_cameras(outputs.cameras, self._last[:, 1:])
        data, images = self.config.data, self.config.data / self.config.images_path
        factor = self._downscale_factor or 1
        images = images if factor == 1 else images.with_name(f"{images.name}_{factor}")
        folders = {key: data / name for key, name in FRAME_FILES.items() if (data / name).is_dir()}
        frames = {
            Path(image): {
                key: (folder / Path(image).relative_to(images)).with_suffix(".png") for key, folder in folders.items()
            }
            for image in outputs.image_filenames
        }
        return shifted(add_frame_files(outputs, frames), self.offset)

    def _get_all_images_and_cameras(self, recon_dir: Path) -> dict[str, Any]:
        """Read the model as nerfstudio does, less the offset. Names end with their line: its text reader stops at a
        space. It refuses any k4, k5 or k6.
        """
        if self._model is None or self._model[0] != recon_dir:
            with replaced(colmap_dataparser, "parse_colmap_camera_params", _camera):
                self._model = recon_dir, super()._get_all_images_and_cameras(recon_dir)
        found = copy.deepcopy(self._model[1])  # frames are changed
        self._last = torch.tensor([[frame.pop(key, 0.0) for key in ("k4", "k5", "k6")] for frame in found["frames"]])
        axes = np.array(found.get("applied_transform", np.eye(4)), np.float64)[:3, :3]
        positions = np.array([frame["transform_matrix"][:3, 3] for frame in found["frames"]], np.float64)
        self.offset = offset_for(positions @ axes, self._given_offset)
        if self.offset.any():
            for frame in found["frames"]:
                frame["transform_matrix"][:3, 3] -= axes @ self.offset
        if not (recon_dir / "cameras.txt").exists():
            return found
        names = names_in_text(recon_dir / "images.txt")
        options = self.config
        for frame in found["frames"]:
            name = names[frame["colmap_im_id"]]
            frame["file_path"] = (options.data / options.images_path / name).as_posix()
            for key, folder in (("mask_path", options.masks_path), ("depth_path", options.depths_path)):
                if folder is not None:
                    frame[key] = (options.data / folder / name).with_suffix(".png").as_posix()
        return found

    def _get_image_indices(self, image_filenames: list[Path], split: str) -> Any:
        listed = listed_split(split, lambda name: (self.config.data / f"{name}_list.txt").exists())
        indices = super()._get_image_indices(image_filenames, listed)
        self._last = self._last[torch.as_tensor(indices, dtype=torch.long)]
        return indices

    def _load_3D_points(self, colmap_path: Path, transform_matrix: Tensor, scale_factor: float) -> dict[str, Tensor]:
        file, found = colmap_path / "points3D.bin", None
        if self.config.max_2D_matches_per_3D_point == 0 and file.exists():
            asked = file, transform_matrix.numpy().tobytes(), float(scale_factor)
            if self._read is not None and self._read[:3] == asked:
                return dict(self._read[3])
            points = read_points(file)
            points["xyz"] -= self.offset
            found = _placed(points, transform_matrix, scale_factor)
            found = None if found is None else merged(found)
            self._read = None if found is None else (*asked, found)
        if found is None:
            with ExitStack() as stack:
                for name in ("read_points3D_text", "read_points3D_binary"):
                    reader = _less(self.offset, getattr(colmap_parsing_utils, name))
                    stack.enter_context(replaced(colmap_parsing_utils, name, reader))
                found = merged(super()._load_3D_points(colmap_path, transform_matrix, scale_factor))
        return dict(found)


def _camera(camera: Any) -> dict[str, Any]:
    """Return a camera's intrinsics as nerfstudio does, also of FULL_OPENCV: OPENCV's parameters and four more."""
    if camera.model != "FULL_OPENCV":
        return parse_colmap_camera_params(camera)
    more = zip(("k3", "k4", "k5", "k6"), map(float, camera.params[8:]), strict=True)
    return {**parse_colmap_camera_params(camera._replace(model="OPENCV")), **dict(more)}


def _less(offset: NDArray[np.float64], reader: Callable[[Path], dict[int, Any]]) -> Callable[[Path], dict[int, Any]]:
    """Return nerfstudio's reader of points, with an offset subtracted."""
    if not offset.any():
        return reader
    return lambda file: {key: point._replace(xyz=point.xyz - offset) for key, point in reader(file).items()}


def read_points(file: Path) -> np.ndarray[Any, Any]:
    """Read the points of a points3D.bin, in the file's order.

    Returns:
        [points] with the fields id, xyz [3] float64, rgb [3] uint8, error, and track: its number of views.

    Raises:
        Damaged: the file ends too early.
    """
    data = file.read_bytes()
    try:
        starts = np.array(point_starts(data))[:-1]
    except Damaged as error:
        raise Damaged(f"{file}: {error}") from None
    return gather(data, starts, _POINT)


def _placed(points: np.ndarray[Any, Any], transform_matrix: Tensor, scale_factor: float) -> dict[str, Tensor] | None:
    """Return the points as nerfstudio's parser does; None if two share an id, of which nerfstudio keeps the last."""
    if len(np.unique(points["id"])) < len(points):
        return None
    xyz = torch.from_numpy(points["xyz"].astype(np.float32))
    xyz = torch.cat((xyz, torch.ones_like(xyz[:, :1])), -1) @ transform_matrix.T
    return {
        "points3D_xyz": xyz.mul_(scale_factor),
        "points3D_rgb": torch.from_numpy(np.ascontiguousarray(points["rgb"])),
        "points3D_error": torch.from_numpy(points["error"].astype(np.float32)),
        "points3D_num_points2D": torch.from_numpy(points["track"].astype(np.int64)),
    }
