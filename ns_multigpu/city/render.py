"""Pictures, averaged over rays through each pixel; and depth."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ns_multigpu.city.shade import ShadedCity, radiance
from ns_multigpu.city.trace import SKY, Width, trace

_TILE = 64
_EXPOSURE = 0.62


@dataclass(frozen=True)
class Pinhole:
    """A camera without distortion.

    Attributes:
        c2w: [3, 4] camera to world, OpenGL axes: x right, y up, looking along -z; metres.
        fx, fy, cx, cy: pixels; the middle of the first pixel is (0.5, 0.5).
        width, height: pixels.
    """

    c2w: Tensor
    fx: float
    fy: float
    cx: float
    cy: float
    width: int
    height: int

    def rays(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rays through image positions x, y [n]: origin [3, n], unit direction [3, n], and depth per distance
        [n].
        """
        pose = self.c2w.to(x.device, torch.float32)
        right, up = (x - self.cx) / self.fx, (self.cy - y) / self.fy
        scale = (right * right + up * up + 1.0).rsqrt()
        local = (right, up, -1.0)
        d = torch.stack([(pose[k, 0] * local[0] + pose[k, 1] * local[1] - pose[k, 2]) * scale for k in range(3)])
        return pose[:, 3:4].expand(3, len(x)), d, scale


def default_chunk(device: torch.device) -> int:
    """Return the number of rays to trace at once: few enough for a CPU's caches, or enough to fill a GPU."""
    return 1 << 17 if device.type == "cpu" else 1 << 21


@contextmanager
def single_threaded(device: torch.device) -> Iterator[None]:
    """Limit this thread to one core while it renders on a CPU.

    The thousands of small operations of a picture gain little from being split, and each split waits for the slowest
    core: on a busy machine a hundred times longer than the work. Views are rendered side by side instead.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)  # of the calling thread: OpenMP keeps the number per thread
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@lru_cache(maxsize=16)
def _jitter(samples: int, device: torch.device) -> Tensor:
    """Return [2, TILE * TILE, samples] positions in a pixel: a random one in each cell of the finest near-square
    grid.
    """
    rows = max(r for r in range(1, math.isqrt(samples) + 1) if samples % r == 0)
    columns = samples // rows
    generator = torch.Generator().manual_seed(samples)
    offset = torch.rand(2, _TILE * _TILE, samples, generator=generator)
    index = torch.arange(samples)
    x, y = (index % columns + offset[0]) / columns, (index // columns + offset[1]) / rows
    return torch.stack([x, y]).to(device)


def tone_map(colour: Tensor) -> Tensor:
    """Map linear light to display values in [0, 1]: Narkowicz's fit of the ACES filmic curve (2015), then gamma 2.2."""
    x = (colour * _EXPOSURE).clamp_min(0)
    x = (x * (2.51 * x + 0.03)) / (x * (2.43 * x + 0.59) + 0.14)
    return x.clamp(0, 1).pow(1 / 2.2)


@torch.no_grad()
def render_rgb(scene: ShadedCity, camera: Pinhole, samples: int, chunk: int | None = None) -> Tensor:
    """Render a picture.

    Args:
        scene: what is looked at; its device does the work.
        camera: from where.
        samples: rays a pixel, at least 1, stratified; always the same ones for the same pixel.
        chunk: rays at once; changes memory, not the picture.

    Returns:
        [height, width, 3] uint8 on the scene's device.
    """
    with single_threaded(scene.device):
        return _render_rgb(scene, camera, samples, chunk or default_chunk(scene.device))


def _render_rgb(scene: ShadedCity, camera: Pinhole, samples: int, chunk: int) -> Tensor:
    device = scene.device
    step = max(1, chunk // samples)
    jitter = _jitter(samples, device)
    total = camera.width * camera.height
    result = torch.empty(total, 3, dtype=torch.uint8, device=device)
    for start in range(0, total, step):
        pixel = torch.arange(start, min(start + step, total), device=device)
        row, column = pixel // camera.width, pixel % camera.width
        tile = (row % _TILE) * _TILE + column % _TILE
        x = column[:, None] + jitter[0].index_select(0, tile)
        y = row[:, None] + jitter[1].index_select(0, tile)
        origin, direction, _ = camera.rays(x.reshape(-1), y.reshape(-1))
        light = radiance(scene, origin, direction, 1.0 / camera.fx)
        # A lamp or a glint brighter than white must not rule its pixel.
        mean = light.clamp_max(4.0).reshape(3, -1, samples).mean(dim=2)
        result[start : start + len(pixel)] = (tone_map(mean) * 255.0 + 0.5).to(torch.uint8).t()
    return result.reshape(camera.height, camera.width, 3)


@torch.no_grad()
def render_depth(scene: ShadedCity, camera: Pinhole, chunk: int | None = None) -> Tensor:
    """Return depth along the camera's axis through each pixel's middle: [height, width] float32 metres, 0 for sky."""
    with single_threaded(scene.device):
        return _render_depth(scene, camera, chunk or default_chunk(scene.device))


def _render_depth(scene: ShadedCity, camera: Pinhole, chunk: int) -> Tensor:
    device, step = scene.device, chunk
    total = camera.width * camera.height
    result = torch.empty(total, device=device)
    for start in range(0, total, step):
        pixel = torch.arange(start, min(start + step, total), device=device)
        origin, direction, scale = camera.rays(pixel % camera.width + 0.5, pixel // camera.width + 0.5)
        width = Width(torch.zeros_like(scale), 1.0 / camera.fx)
        t, number = trace(scene.geometry, origin, direction, width)
        result[start : start + len(pixel)] = torch.where(number == SKY, torch.zeros_like(t), t * scale)
    return result.reshape(camera.height, camera.width)
