"""Capture of a city: cameras known at once, pictures rendered on demand."""

import math
import threading
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ns_multigpu.city import cameras
from ns_multigpu.city.cache import TensorCache
from ns_multigpu.city.city import City
from ns_multigpu.city.render import Pinhole, render_depth, render_rgb
from ns_multigpu.city.seed_points import SeedPoints, default_count, sample_seed_points
from ns_multigpu.city.shade import ShadedCity

Kind = Literal["aerial", "street"]
Split = Literal["train", "val", "test", "all"]

_TRAJECTORIES = {"aerial": cameras.aerial, "street": cameras.street}


class CityCapture:
    """Views of a city, rendered on demand and never written to disk.

    Args:
        city: what is captured.
        kind: "aerial" (nadir and oblique views on a grid) or "street" (along the roads).
        views: how many, at least 2; 60,000 are no trouble.
        width, height: of the pictures, pixels.
        samples: rays a pixel.
        seed: of the small deviations from the planned path.
        eval_interval: every such view is held out, beginning with view 0 (as nerfstudio's parsers do); 0 for none.
        time_varying: moving cars are where they are at each view's time; otherwise they stand where they are at time 0.
        altitude: of the cameras, metres above the ground; None for the kind's own choice.
        cache_bytes: at most this much is kept of pictures already rendered.
        rig: so many cameras stand still and film at the same moments: view v is camera v % rig at moment v // rig. None
            for one that goes along, with a time for each view.

    Attributes:
        c2w: [views, 3, 4] float32 camera to world, OpenGL axes (x right, y up, looking along -z) as nerfstudio has
            them; metres.
        times: [views] float32 in [0, 1], never falling; all 0 unless time_varying.
        fx, fy, cx, cy: intrinsics in pixels, the same for all views; the middle of the first pixel is (0.5, 0.5).

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        city: City,
        kind: Kind = "aerial",
        views: int = 200,
        width: int = 960,
        height: int = 540,
        samples: int = 4,
        seed: int = 0,
        eval_interval: int = 8,
        time_varying: bool = False,
        altitude: float | None = None,
        cache_bytes: int = 256 << 20,
        rig: int | None = None,
    ) -> None:
        if kind not in get_args(Kind):
            raise ValueError(f"capture is {kind!r}: choose one of {', '.join(get_args(Kind))}")
        for name, value, least in (
            ("views", views, 2), ("width", width, 8), ("height", height, 8), ("samples", samples, 1), ("seed", seed, 0)
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"{name} is {value}: give at least {least}")
        if eval_interval < 0 or eval_interval == 1:
            raise ValueError(f"eval_interval is {eval_interval}: give 2 or more, or 0 to hold out no view")
        if altitude is not None and altitude <= 0.5:
            raise ValueError(f"altitude is {altitude} m: cameras must be above the ground, at 0.5 m or more")
        if rig is not None and not (rig >= 2 and 2 * rig <= views):
            raise ValueError(f"rig is {rig}: give 2 cameras or more, and at least two views for each of them")
        self._arguments = (
            city, kind, views, width, height, samples, seed, eval_interval, time_varying, altitude, cache_bytes, rig
        )  # fmt: skip
        self.city, self.kind, self.views = city, kind, views
        self.width, self.height, self.samples = width, height, samples
        self.seed, self.eval_interval, self.time_varying = seed, eval_interval, time_varying
        planned = _TRAJECTORIES[kind](city, rig or views, seed, altitude)
        c2w, times = planned.c2w, planned.times
        if rig is not None:
            numbers = np.arange(views)
            c2w, times = c2w[numbers % rig], (numbers // rig) / ((views - 1) // rig)
        self.c2w = torch.from_numpy(c2w).float()
        self.times = torch.from_numpy(times).float() * float(time_varying)
        # The field of view is that of the longer side, so that a tall picture does not look straight up and down.
        self.fx = self.fy = 0.5 * max(width, height) / math.tan(math.radians(planned.fov) / 2)
        self.cx, self.cy = 0.5 * width, 0.5 * height
        self.cache = TensorCache(cache_bytes)
        self._seeds: dict[tuple[int, float], SeedPoints] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return CityCapture, self._arguments

    def __deepcopy__(self, memo: dict) -> "CityCapture":
        return self  # a capture never changes; its cache is to be shared

    def __len__(self) -> int:
        return self.views

    def camera(self, view: int) -> Pinhole:
        """Return the camera of a view."""
        if not 0 <= view < self.views:
            raise IndexError(f"view {view} of a capture of {self.views} views")
        return Pinhole(self.c2w[view], self.fx, self.fy, self.cx, self.cy, self.width, self.height)

    def viewmats(self) -> Tensor:
        """Return [views, 4, 4] world to camera, OpenCV axes (x right, y down, looking along +z): COLMAP's and
        gsplat's.
        """
        rotation = self.c2w[:, :, :3].double() * torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
        result = torch.eye(4, dtype=torch.float64).repeat(self.views, 1, 1)
        result[:, :3, :3] = rotation.transpose(1, 2)
        result[:, :3, 3] = -(rotation.transpose(1, 2) @ self.c2w[:, :, 3:].double()).squeeze(2)
        return result.float()

    def name(self, view: int) -> str:
        """Return the file name of a view, without folder and suffix."""
        return f"{self.kind}_{view:06d}"

    def split(self, which: Split) -> NDArray[np.int64]:
        """Return the views of a split: "train", "val" and "test" (both: the held-out ones), or "all".

        Where no views are held out, "val" and "test" are all views, as are "train" and "all".
        """
        numbers = np.arange(self.views)
        if which == "all" or self.eval_interval == 0:
            return numbers
        held_out = numbers % self.eval_interval == 0
        return numbers[~held_out] if which == "train" else numbers[held_out]

    def image(self, view: int, device: torch.device | str = "cpu", scale: float = 1.0) -> Tensor:
        """Return the picture of a view, [height, width, 3] uint8 on the CPU; cached, so do not write to it.

        Args:
            view: its number.
            device: where it is rendered. Pictures of different devices differ by rounding, so each is cached.
            scale: of the picture's size, as by averaging pixels; both sides are rounded down.
        """
        device = torch.device(device)

        def make() -> Tensor:
            return render_rgb(self._scene(view, device), self._scaled(view, scale), self.samples).cpu()

        return self.cache.get(("rgb", view, device.type, scale), make)

    def depth(self, view: int, device: torch.device | str = "cpu", scale: float = 1.0) -> Tensor:
        """Return the depth of a view: [height, width] float32 metres along the camera's axis, through each pixel's
        middle.

        0 where there is only sky. On the CPU, cached: do not write to it.
        """
        device = torch.device(device)

        def make() -> Tensor:
            return render_depth(self._scene(view, device), self._scaled(view, scale)).cpu()

        return self.cache.get(("depth", view, device.type, scale), make)

    def render(self, view: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return picture [height, width, 3] uint8 and depth [height, width] metres of a view (see `image` and
        `depth`).
        """
        return self.image(view, device), self.depth(view, device)

    def seed_points(
        self, count: int | None = None, noise: float = 0.03, device: torch.device | str = "cpu"
    ) -> SeedPoints:
        """Return points on the surfaces that the training views see, like those of structure from motion.

        Args:
            count: how many; None for a number that grows with the city and the views.
            noise: standard deviation of their places, metres.
            device: where rays are traced.

        Returns:
            The points: xyz [n, 3] float32 metres and rgb [n, 3] uint8, on the CPU; the same ones for the same capture.

        Raises:
            ValueError: count is below 1 or noise negative.
        """
        count = default_count(self.city, self.views) if count is None else count
        with self._lock:
            if (count, noise) not in self._seeds:
                self._seeds[count, noise] = sample_seed_points(self, count, noise, torch.device(device))
            return self._seeds[count, noise]

    def _scene(self, view: int, device: torch.device) -> ShadedCity:
        return self.city.scene(float(self.times[view]), device)

    def _scaled(self, view: int, scale: float) -> Pinhole:
        camera = self.camera(view)
        if scale == 1.0:
            return camera
        # In float32, as other modules scale tensors of sizes: 100 * 0.29 must not give 28 here and 29 there.
        width, height = (int(np.float32(side) * np.float32(scale)) for side in (camera.width, camera.height))
        if min(width, height) < 1:
            raise ValueError(f"scale is {scale}: nothing is left of {camera.width} x {camera.height} pixels")
        return Pinhole(
            camera.c2w, camera.fx * scale, camera.fy * scale, camera.cx * scale, camera.cy * scale, width, height
        )
