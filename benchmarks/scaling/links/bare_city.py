"""Run of `ns-train` on a city without rendering: its views, one random image for all of them, and a complete model.

Gaussians are those of `scenes.city_model`, so that views show as many as they would late in training. What a step
costs and sends depends on them and on the views. It does not depend on what images show: all views have the same noise.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.dataparsers.base_dataparser import DataParser, DataParserConfig, DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.data.scene_box import SceneBox
from torch import Tensor

from benchmarks.scenes.city_model import CityScene, make_model
from ns_multigpu.city.capture import CityCapture, Kind
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.model.splat_model import SplatModel

_SEED = 7


class NoiseImages(InputDataset):
    """The same noise for each view."""

    def get_numpy_image(self, image_idx: int) -> npt.NDArray[np.uint8]:
        """Return [height, width, 3]."""
        camera = self.cameras[image_idx]
        return noise(int(camera.width.item()), int(camera.height.item()))


@cache
def noise(width: int, height: int) -> npt.NDArray[np.uint8]:
    """Return [height, width, 3] of any value."""
    return np.random.default_rng(_SEED).integers(0, 256, (height, width, 3), dtype=np.uint8)


@dataclass
class BareCityConfig(DataParserConfig):
    """Views of a city, without its pictures."""

    _target: type = field(default_factory=lambda: BareCity)
    data: Path = Path()
    scene: CityScene = field(default_factory=lambda: CityScene(1000, 64, 48))
    kind: Kind = "aerial"


@dataclass
class BareCity(DataParser):
    """See BareCityConfig. Units are metres."""

    config: BareCityConfig
    dataset_type: type[InputDataset] = NoiseImages

    def _generate_dataparser_outputs(self, split: str = "train", **_: Any) -> DataparserOutputs:
        scene, capture = self.config.scene, self.config.scene.capture
        if self.config.kind == "street":
            capture = CityCapture(capture.city, "street", capture.views, scene.width, scene.height, 1)
        count = scene.views if split == "train" else 1
        picked = [round(k * (capture.views - 1) / max(1, count - 1)) for k in range(count)]
        cameras = Cameras(
            capture.c2w[picked], capture.fx, capture.fy, capture.cx, capture.cy, scene.width, scene.height,
            camera_type=CameraType.PERSPECTIVE,
        )  # fmt: skip
        box = SceneBox(aabb=scene.half_size * torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
        return DataparserOutputs([Path(f"{view}.png") for view in picked], cameras, scene_box=box)


@dataclass
class GrownModelConfig(SplatModelConfig):
    """Begins with the city's whole model."""

    _target: type = field(default_factory=lambda: GrownModel)
    scene: CityScene = field(default_factory=lambda: CityScene(1000, 64, 48))


class GrownModel(SplatModel):
    """See GrownModelConfig."""

    config: GrownModelConfig

    def initial_points(self) -> dict[str, Tensor]:
        """Return all points on this rank's device. Each rank makes them all, as each reads all seed points."""
        return _points(self.config.scene, torch.cuda.current_device() if torch.cuda.is_available() else None)


@cache
def _points(scene: CityScene, gpu: int | None) -> dict[str, Tensor]:
    return make_model(scene, World.single(torch.device("cpu") if gpu is None else torch.device("cuda", gpu))).params
