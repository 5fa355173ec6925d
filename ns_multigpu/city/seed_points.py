"""Seed points like those of structure from motion, sampled from the surfaces that views see."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ns_multigpu.city.city import City
from ns_multigpu.city.render import default_chunk, single_threaded, tone_map
from ns_multigpu.city.shade import ShadedCity, radiance
from ns_multigpu.city.trace import Width, trace

if TYPE_CHECKING:
    from ns_multigpu.city.capture import CityCapture

_MOST_VIEWS = 256
"""Largest number of views that rays start from; more see nothing new."""
_MOST_MOMENTS = 48
"""The same limit if every view has its own time and so its own scene."""
_FARTHEST = 600.0
"""Largest distance of points: structure from motion finds few beyond some hundred metres."""
_MOST = 4_000_000


class SeedPoints(NamedTuple):
    """xyz [n, 3] float32 metres; rgb [n, 3] uint8; both on the CPU."""

    xyz: Tensor
    rgb: Tensor


def default_count(city: City, views: int) -> int:
    """Return a number of points for a city and its views: some per square metre, some hundred per view."""
    area = (2 * city.half) ** 2
    return int(min(max(2000, min(1.2 * area, 400 * views)), _MOST))


def moving_range(scene: ShadedCity, city: City) -> tuple[int, int]:
    """Return the numbers [first, end) of the solids that can move: bodies, then cabins."""
    end = scene.attributes.shape[1]
    return end - 2 * len(city.cars), end


@torch.no_grad()
def sample_seed_points(capture: "CityCapture", count: int, noise: float, device: torch.device) -> SeedPoints:
    """Draw points (see CityCapture.seed_points).

    Rays go through random places of pictures of evenly chosen training views, as many through each. Points on the sky,
    far away, or on cars of a time-varying capture are drawn again.

    Raises:
        ValueError: count is below 1 or noise negative.
        RuntimeError: the views see next to nothing.
    """
    if count < 1:
        raise ValueError(f"points is {count}: give at least 1")
    if noise < 0:
        raise ValueError(f"noise is {noise} m: give 0 or more")
    train = torch.from_numpy(capture.split("train"))
    most = _MOST_MOMENTS if capture.time_varying else _MOST_VIEWS
    chosen = train[torch.linspace(0, len(train) - 1, min(len(train), most)).round().long()]
    generator = torch.Generator().manual_seed(capture.seed * 7919 + capture.city.seed)
    xyz, rgb, have = [], [], 0
    with single_threaded(device):
        for attempt in range(20):
            # Some rays miss: ask for a little more than what is still wanted, the more the more were missed before.
            wanted = int(1.25 * (count - have)) + 16
            views = chosen[torch.randint(len(chosen), (wanted,), generator=generator)].sort().values
            places = torch.rand(2, wanted, generator=generator)
            found = _cast(capture, views, places, device)
            keep = min(len(found.xyz), count - have)
            if keep < len(found.xyz):  # views are in order: take from all of them
                pick = torch.randperm(len(found.xyz), generator=generator)[:keep].sort().values
                found = SeedPoints(found.xyz[pick], found.rgb[pick])
            xyz.append(found.xyz)
            rgb.append(found.rgb)
            have += keep
            if have == count:
                break
            if attempt == 4 and have < count // 100:
                break
    if have < count:
        raise RuntimeError(f"only {have} of {count} seed points found: the views see next to nothing of the city")
    places = torch.cat(xyz)
    return SeedPoints(places + noise * torch.randn(places.shape, generator=generator), torch.cat(rgb))


def _cast(capture: "CityCapture", views: Tensor, places: Tensor, device: torch.device) -> SeedPoints:
    """Trace rays through positions [2, n] in [0, 1] of the pictures of views [n] (in order); return the usable hits."""
    parts: list[SeedPoints] = []
    step = default_chunk(device)
    times = capture.times[views]
    # Cars move between views: rays of one moment are traced together.
    groups = torch.unique_consecutive(times, return_counts=True)[1].tolist() if capture.time_varying else [len(views)]
    start = 0
    for size in groups:
        scene = capture.city.scene(float(times[start]), device)
        for low in range(start, start + size, step):
            high = min(low + step, start + size)
            parts.append(_cast_chunk(capture, scene, views[low:high], places[:, low:high]))
        start += size
    return SeedPoints(torch.cat([p.xyz for p in parts]), torch.cat([p.rgb for p in parts]))


def _cast_chunk(capture: "CityCapture", scene: ShadedCity, views: Tensor, places: Tensor) -> SeedPoints:
    device = scene.device
    pose = capture.c2w[views].to(device)
    right = (places[0].to(device) * capture.width - capture.cx) / capture.fx
    up = (capture.cy - places[1].to(device) * capture.height) / capture.fy
    local = torch.stack([right, up, -torch.ones_like(right)], dim=1)
    d = torch.einsum("nij,nj->in", pose[:, :, :3], local)
    d = d / d.norm(dim=0)
    o = pose[:, :, 3].t().contiguous()
    spread = 1.0 / capture.fx
    t, number = trace(scene.geometry, o, d, Width(torch.zeros_like(right), spread))
    good = t < _FARTHEST
    if capture.time_varying:
        first, end = moving_range(scene, capture.city)
        good &= (number < first) | (number >= end)
    pick = good.nonzero().squeeze(1)
    o, d, t = o[:, pick], d[:, pick], t[pick]
    colour = tone_map(radiance(scene, o.contiguous(), d.contiguous(), spread))
    return SeedPoints((o + d * t).t().cpu(), (colour * 255 + 0.5).to(torch.uint8).t().cpu())
