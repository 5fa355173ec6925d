"""Lists of training and held-out views of a capture: "val" and "test" replace each other if one is missing.

Training evaluates "val", and every later command evaluates "test". nerfstudio's parsers raise if a list is missing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.data.dataparsers import nerfstudio_dataparser
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.dataparsers.nerfstudio_dataparser import Nerfstudio, NerfstudioDataParserConfig
from nerfstudio.utils.io import load_from_json

from ns_multigpu.plugin.capture.coordinate_offset import Offset, offset_for, replaced, shifted
from ns_multigpu.plugin.capture.image_files import FRAME_FILES, add_frame_files
from ns_multigpu.plugin.capture.opencv_cameras import DISTORTIONS, opencv_cameras

_HELD_OUT = {"val": ("val", "validation", "test"), "test": ("test", "val", "validation")}
"""Lists of a split's views, in order of preference."""


def listed_split(split: str, is_listed: Callable[[str], bool]) -> str:
    """Return the name of the list to read for a split: its own, or that of the other held-out split."""
    return next((name for name in _HELD_OUT.get(split, ()) if is_listed(name)), split)


def missing_list(is_listed: Callable[[str], bool], file: str) -> str | None:
    """Return a description of the list that is missing; None if none is missing.

    Args:
        file: format of a list's name, such as "{}_list.txt".
    """
    train, held_out = is_listed("train"), any(map(is_listed, _HELD_OUT["val"]))
    if train == held_out:
        return None
    have, missing, views = ("train", "val", "held-out") if train else ("val or test", "train", "training")
    return f"{file.format(have)} and no list of {views} views. Add {file.format(missing)}"


class ListedNerfstudio(Nerfstudio):
    """nerfstudio's parser of transforms.json that reads the list of `listed_split` and OpenCV's k4, k5 and k6,
    subtracts an offset, and names `FRAME_FILES`.

    Args:
        config: nerfstudio's.
        offset: see `OffsetOption`.
    """

    def __init__(self, config: NerfstudioDataParserConfig, offset: Offset | None = None) -> None:
        super().__init__(config)
        self._given_offset, self.offset = offset, np.zeros(3)

    def _generate_dataparser_outputs(self, split: str = "train") -> DataparserOutputs:
        data = self.config.data
        folder = data.parent if data.suffix == ".json" else data
        meta: Any = load_from_json(data if data.suffix == ".json" else data / "transforms.json")
        poses = np.array([frame["transform_matrix"] for frame in meta["frames"]], np.float64)
        self.offset = offset_for(poses[:, :3, 3], self._given_offset)
        moved = np.zeros(3)
        if self.offset.any():
            poses[:, :3, 3] -= self.offset
            meta["frames"] = [
                {**frame, "transform_matrix": pose} for frame, pose in zip(meta["frames"], poses, strict=True)
            ]
            if "applied_transform" in meta:  # nerfstudio would round its translation
                rotation, moved = np.split(np.array(meta["applied_transform"]), [3], axis=1)
                meta["applied_transform"] = np.pad(rotation, ((0, 0), (0, 1))).tolist()
        one_lens = any(key in meta for key in (*DISTORTIONS, "distortion_params"))
        if one_lens:
            meta.setdefault("k1", 0.0)  # k4 alone would not count for nerfstudio
        with replaced(nerfstudio_dataparser, "load_from_json", lambda _: meta):
            listed = listed_split(split, lambda name: f"{name}_filenames" in meta)
            outputs = super()._generate_dataparser_outputs(listed)
        frames: dict[Path, Any] = {self._get_fname(Path(frame["file_path"]), folder): frame for frame in meta["frames"]}
        files = {
            file: {key: folder / str(frame[key]) for key in FRAME_FILES if key in frame}
            for file, frame in frames.items()
        }
        add_frame_files(outputs, files)
        lenses = [meta if one_lens else frames[file] for file in outputs.image_filenames]
        more = torch.tensor([[float(lens.get(key, 0)) for key in ("k5", "k6")] for lens in lenses])
        outputs.cameras = opencv_cameras(outputs.cameras, more.view(-1, 2))
        # nerfstudio may have set an applied_transform.
        rotation = np.array(meta.get("applied_transform", np.eye(4)))[:3, :3]
        return shifted(outputs, self.offset, rotation, moved.reshape(3))
