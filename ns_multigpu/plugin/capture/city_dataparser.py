"""Nerfstudio dataparser of the procedural city: `ns-train METHOD city --blocks 4 --capture aerial --views 200`.

It reads and writes no data folder. The options in config.yml determine the city, so ns-eval, ns-render and ns-viewer
use the same one. `CityDataset` renders pictures on demand. The parser's attribute `dataset_type` names that class for
the datamanager.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.dataparsers.base_dataparser import DataParser, DataParserConfig, DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.data.scene_box import SceneBox

if TYPE_CHECKING:
    from ns_multigpu.city import CityCapture

CAPTURE, VIEWS, DEPTH = "city_capture", "city_views", "city_depth"
"""Keys of DataparserOutputs.metadata: the CityCapture, the numbers of its views [n] int64, whether depth is wanted."""


class CityDataset(InputDataset):
    """Dataset of city views, rendered on demand and kept in the capture's bounded cache.

    Args:
        dataparser_outputs: of a CityDataParser.
        scale_factor: factor of the pictures' size; pictures are rendered at the scaled size.

    Raises:
        ValueError: the outputs are those of another dataparser.
    """

    def __init__(self, dataparser_outputs: DataparserOutputs, scale_factor: float = 1.0) -> None:
        if CAPTURE not in dataparser_outputs.metadata:
            raise ValueError("CityDataset renders the views of the dataparser `city`; this one reads files")
        super().__init__(dataparser_outputs, scale_factor)
        self.exclude_batch_keys_from_device = [*self.exclude_batch_keys_from_device, "depth_image"]
        self.capture: CityCapture = dataparser_outputs.metadata[CAPTURE]
        self.views: list[int] = dataparser_outputs.metadata[VIEWS].tolist()
        self.render_device = render_device(dataparser_outputs.metadata["city_render_device"])

    def get_numpy_image(self, image_idx: int) -> npt.NDArray[np.uint8]:
        """Return a copy of the picture [height, width, 3] of the split's view `image_idx`."""
        return self.capture.image(self.views[image_idx], self.render_device, self.scale_factor).numpy().copy()

    def get_metadata(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return `depth_image` [height, width, 1] in the poses' scale, 0 for sky; {} unless the parser was asked for
        depth.
        """
        if not self.metadata[DEPTH]:
            return {}
        depth = self.capture.depth(self.views[data["image_idx"]], self.render_device, self.scale_factor)
        return {"depth_image": depth[..., None] * self._dataparser_outputs.dataparser_scale}


def render_device(wanted: str) -> torch.device:
    """Return the device that renders: "cpu", "cuda" (the current one), or "auto" (cuda if available).

    Raises:
        RuntimeError: cuda is wanted and there is none.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("render-device is cuda, but no CUDA device was found: give cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass
class CityDataParserConfig(DataParserConfig):
    """Options of a procedural city that is rendered on demand, without download or data folder."""

    _target: type = field(default_factory=lambda: CityDataParser)
    data: Path = Path()
    """Unused: the city needs no data."""
    blocks: int = 2
    """Blocks along each side of the city; a block and its road measure 70 m."""
    capture: Literal["aerial", "street"] = "aerial"
    """Camera positions: nadir and oblique from the air ("aerial"), or along the roads ("street")."""
    views: int = 200
    """Number of views, held-out ones included."""
    width: int = 960
    """Width of a picture, pixels."""
    height: int = 540
    """Height of a picture, pixels."""
    samples: int = 4
    """Rays per pixel."""
    seed: int = 0
    """Seed of the city and of the camera path."""
    eval_interval: int = 8
    """Interval of held-out views, beginning with the first; 0 trains and evaluates on all views."""
    points: int | None = None
    """Number of seed points; by default it follows from the city and the number of views."""
    point_noise: float = 0.03
    """Standard deviation of the seed points' positions, metres."""
    time_varying: bool = False
    """Move the cars from view to view; each view gets a time in [0, 1]."""
    rig: int | None = None
    """Number of fixed cameras that film at the same moments; by default one moving camera."""
    car_density: float = 1.0
    """Density of cars: 1 for an ordinary day, 0 for none."""
    altitude: float | None = None
    """Height of the cameras above the ground, metres; by default it follows from the capture."""
    depth: bool = False
    """Add depth_image to each dataset item."""
    render_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that renders pictures; auto takes the current GPU if available."""
    cache_mb: int = 64
    """Memory limit of the cache of rendered pictures, MiB. Training keeps its images outside of it."""


@dataclass
class CityDataParser(DataParser):
    """Dataparser of the cameras and seed points of a city; see CityDataParserConfig.

    Attributes:
        dataset_type: the dataset that renders this parser's views.
    """

    config: CityDataParserConfig
    dataset_type: type[InputDataset] = CityDataset

    def __init__(self, config: CityDataParserConfig) -> None:
        super().__init__(config)
        self.includes_time = config.time_varying
        self._capture: CityCapture | None = None

    @property
    def city_capture(self) -> "CityCapture":
        """Create the capture at first use.

        Raises:
            ValueError: an option is out of range.
        """
        if self._capture is None:
            from ns_multigpu.city import City, CityCapture  # here, since every nerfstudio command loads this file

            c = self.config
            self._capture = CityCapture(
                City(c.blocks, c.seed, c.car_density), c.capture, c.views, c.width, c.height, c.samples, c.seed,
                c.eval_interval, c.time_varying, c.altitude, c.cache_mb << 20, c.rig,
            )  # fmt: skip
        return self._capture

    def _generate_dataparser_outputs(self, split: str = "train", **_: Any) -> DataparserOutputs:
        capture = self.city_capture
        numbers = torch.from_numpy(capture.split(split))  # type: ignore[arg-type]
        # z is up already: centre on the cameras and scale into [-1, 1], as nerfstudio's other parsers do.
        positions = capture.c2w[:, :, 3]
        transform = torch.eye(4)[:3]
        transform[:, 3] = -positions.double().mean(dim=0).float()
        scale = 1.0 / float((positions + transform[:, 3]).abs().max())
        poses = capture.c2w[numbers].clone()
        poses[:, :, 3] = (poses[:, :, 3] + transform[:, 3]) * scale
        cameras = Cameras(
            camera_to_worlds=poses,
            fx=capture.fx,
            fy=capture.fy,
            cx=capture.cx,
            cy=capture.cy,
            width=capture.width,
            height=capture.height,
            camera_type=CameraType.PERSPECTIVE,
            times=capture.times[numbers][:, None] if self.config.time_varying else None,
        )
        points = capture.seed_points(
            self.config.points, self.config.point_noise, render_device(self.config.render_device)
        )
        return DataparserOutputs(
            image_filenames=[Path("city") / f"{capture.name(view)}.png" for view in numbers.tolist()],
            cameras=cameras,
            scene_box=SceneBox(aabb=torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])),
            dataparser_transform=transform,
            dataparser_scale=scale,
            metadata={
                "points3D_xyz": (points.xyz + transform[:, 3]) * scale,
                "points3D_rgb": points.rgb,
                CAPTURE: capture,
                VIEWS: numbers,
                DEPTH: self.config.depth,
                "city_render_device": self.config.render_device,
            },
        )
