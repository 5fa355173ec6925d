"""A model of the procedural city of any size, sharded over the ranks; and views of it to train on.

Points lie where rays from straight above and from four sides meet the city, so that roofs and walls have some. The city
grows with the points. Their distance is about 20 cm, as in aerial captures, and a view straight down sees two million.
The model is the same for any number of ranks: rays are drawn in pieces whose generator has the piece's number, and
points are put into the order of `primitives.morton`, of which each rank has one range.

Each rank makes its part on its own device and exchanges 24 bytes a point.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ext.ops.project.lens import lens_intrinsics
from ns_multigpu.city.cameras import AERIAL_FOV
from ns_multigpu.city.capture import CityCapture
from ns_multigpu.city.city import City
from ns_multigpu.city.render import render_rgb, tone_map
from ns_multigpu.city.shade import ShadedCity, radiance
from ns_multigpu.city.trace import Width, trace
from ns_multigpu.core.assign.placement import even_bounds
from ns_multigpu.core.dist.collectives import all_gather_ints, exchange_counts, exchange_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.primitives.gaussians.schema import ORDER
from ns_multigpu.primitives.morton import interleaved_codes
from ns_multigpu.primitives.sharded_order import common_grid

DEGREE = 3
"""Degree of the harmonics."""

_SEED = 7
_PLANNED = 40
"""Number of views of the camera path from which the training views are picked evenly."""
_SEEN = 2_000_000
"""Points that a view straight down sees, or a quarter of them all if that is less."""
_AROUND = 1.35
"""Extent of the points, in city sizes: views at the rim see the fields around it."""
_PIECE = 1 << 21
"""Rays at once, at most."""
_DOWN = math.radians(48.0)
"""Angle of the side rays below the horizon."""
_OVERLAP = 0.7
"""A point's standard deviation, in distances between points."""
_UNEVEN = 0.2
"""Maximum deviation of the axes' logarithms: rotations of a sphere would have no gradient."""
_OPACITY = 0.7
_DC = 0.28209479177387814
"""The harmonic of degree 0."""
_SAMPLES = 1024
"""Codes of each rank that the ranges are cut by."""


LENSES = {"perspective": (-0.05, 0.01, 0.0, 0.0, 0.0, 0.0, 1e-4, 1e-4), "fisheye": (-0.02, 0.002, 0.0, 0.0)}
"""Coefficients as `lens_intrinsics` takes them."""


@dataclass(frozen=True)
class CityScene:
    """Training scene: a city with a number of points, seen in images of a given size.

    Attributes:
        points: of the whole model. width, height: of the pictures.
        views: how many. blocks: along a side of the city; 0 for as many as suit the points.
        lens: what the steps draw through, a key of `LENSES`; the pictures are a pinhole camera's all the same.
    """

    points: int
    width: int
    height: int
    views: int = 8
    blocks: int = 0
    lens: str = ""

    @cached_property
    def capture(self) -> CityCapture:
        """Camera path; its altitude depends only on the number of points."""
        city = _city(self.blocks or max(1, round(6 * math.sqrt(self.points / 8e6))))
        side = 2 * math.tan(math.radians(AERIAL_FOV) / 2)  # of the ground in a picture, in altitudes
        area = min(_SEEN, self.points / 4) * (2 * _AROUND * city.half) ** 2 / self.points
        altitude = max(math.sqrt(area / (side * side * 9 / 16)), 1.1 * city.tallest + 5)
        return CityCapture(city, "aerial", _PLANNED, self.width, self.height, 1, altitude=altitude)

    @property
    def half_size(self) -> float:
        """Half the side of the square that points lie over, metres."""
        return _AROUND * self.capture.city.half

    @property
    def spacing(self) -> float:
        """Metres between points, if the square were flat."""
        return 2 * self.half_size / math.sqrt(self.points)

    @property
    def name(self) -> str:
        points = f"{self.points / 1e6:g}M" if self.points >= 1_000_000 else f"{self.points}"
        known = {(1920, 1080): "1080p", (3840, 2160): "4K", (7680, 4320): "8K"}
        return f"{points} {known.get((self.width, self.height), f'{self.width}x{self.height}')} {self.lens}".strip()

    def cameras(self) -> list[View]:
        """Return the views, on the host. A view's index is its place in this list."""
        capture, matrices = self.capture, self.capture.viewmats()
        K = torch.tensor([[capture.fx, 0.0, capture.cx], [0.0, capture.fy, capture.cy], [0.0, 0.0, 1.0]])
        if self.lens:
            K = lens_intrinsics(K, (self.width, self.height), LENSES[self.lens], fisheye=self.lens == "fisheye")
        picked = self._picked()
        return [View(matrices[k], K, self.width, self.height, index) for index, k in enumerate(picked)]

    @torch.no_grad()
    def images(self, world: World, folder: Path | None = None) -> list[Tensor]:
        """Return the views' pictures [H, W, 3] uint8 on every rank's device. Each rank renders some. Collective.

        Args:
            world: the ranks.
            folder: where they are kept for the next who asks, or None.
        """
        device = world.device
        kept = None if folder is None else folder / f"{self.points}-{self.width}x{self.height}-{self.views}.pt"
        # One rank looks: the others must not find a file that is being written.
        if kept is not None and all_gather_ints([kept.exists()], world)[0][0]:
            return [image.to(device) for image in torch.load(kept, mmap=True)]
        result: list[Tensor] = []
        for place, view in enumerate(self._picked()):
            image = torch.empty(self.height, self.width, 3, dtype=torch.uint8, device=device)
            if place % world.size == world.rank:
                image = render_rgb(self.capture.city.scene(0.0, device), self.capture.camera(view), samples=1)
            result.append(image)
        if world.group is not None:
            for place, image in enumerate(result):
                dist.broadcast(image, place % world.size, group=world.group)
        if kept is not None and world.is_main:
            unfinished = kept.with_suffix(".part")
            torch.save([image.cpu() for image in result], unfinished)
            unfinished.rename(kept)
        return result

    def _picked(self) -> list[int]:
        return [round(k * (_PLANNED - 1) / max(1, self.views - 1)) for k in range(self.views)]


@dataclass
class CityModel:
    """This rank's points.

    Attributes:
        params: by the names of `ORDER`, each contiguous.
        counts: points by rank.
        seconds: that making them took, by part.
        moment_dtype: in which Adam's moments are kept.
    """

    params: dict[str, Tensor]
    counts: Sequence[int]
    seconds: dict[str, float]
    moment_dtype: torch.dtype = torch.float32
    _moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.params["means"])

    @property
    def device(self) -> torch.device:
        return self.params["means"].device

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return Adam's moments, always the same tensors. The first call creates them, with zeros."""
        if not self._moments:
            kind = self.moment_dtype
            self._moments = {
                k: (torch.zeros_like(v, dtype=kind), torch.zeros_like(v, dtype=kind)) for k, v in self.params.items()
            }
        return self._moments

    def forget_moments(self) -> None:
        """Free the moments' memory."""
        self._moments = {}


@torch.no_grad()
def make_model(scene: CityScene, world: World) -> CityModel:
    """Return this rank's range of the scene's points. Collective.

    Opacities are 0.7, colours the city's. Rotations, the other harmonics and the differences between a point's axes are
    noise that depends on its place.
    """
    seconds: dict[str, float] = {}
    watch = _Watch(world.device, seconds)
    records = _sampled(scene, world)
    watch.lap("rays")
    records = _in_order(records, world)
    watch.lap("order")
    params = _parameters(records, scene.spacing)
    watch.lap("parameters")
    counts = [row[0] for row in all_gather_ints([len(records)], world)]
    return CityModel({name: params[name] for name in ORDER}, counts, seconds)


class _Watch:
    def __init__(self, device: torch.device, seconds: dict[str, float]) -> None:
        self._device, self._seconds, self._before = device, seconds, time.perf_counter()

    def lap(self, name: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._seconds[name], self._before = round(now - self._before, 3), now


@lru_cache(maxsize=2)
def _city(blocks: int) -> City:
    return City(blocks, _SEED)


def _sampled(scene: CityScene, world: World) -> Tensor:
    """Return [n, 6] places and colours in [0, 1] of this rank's share of the rays, which is not its range of points
    yet."""
    piece = max(1, min(_PIECE, -(-scene.points // 16)))
    chunks = -(-scene.points // piece)
    bounds = even_bounds(chunks, world.size)
    first, end = (min(bounds[world.rank + k] * piece, scene.points) for k in (0, 1))
    records = torch.empty(end - first, 6, device=world.device)
    if end == first:
        return records
    solid = scene.capture.city.scene(0.0, world.device)
    for start in range(first, end, piece):
        generator = torch.Generator(world.device).manual_seed(_SEED * 1_000_003 + start // piece)
        part = slice(start - first, min(start + piece, end) - first)
        _cast(solid, scene, records[part], generator)
    return records


def _cast(solid: ShadedCity, scene: CityScene, into: Tensor, generator: torch.Generator) -> None:
    """Write the hits of n rays into `into` [n, 6]. Each ray ends on the ground at the latest."""
    count, device, top = len(into), into.device, scene.capture.city.tallest + 2.0
    looks = [(math.radians(89.0), 0.0), *((_DOWN, 0.3 + k * math.pi / 2) for k in range(4))]
    table = [[math.cos(a) * math.cos(h) for a, h in looks], [math.cos(a) * math.sin(h) for a, h in looks]]
    table.append([-math.sin(a) for a, _ in looks])
    direction = torch.tensor(table, device=device)[:, torch.arange(count, device=device) % len(looks)]
    origin = torch.zeros(3, count, device=device)
    origin[:2] = (2 * torch.rand(2, count, generator=generator, device=device) - 1) * scene.half_size
    origin -= direction * (top / -direction[2])
    spread = scene.spacing * math.sin(_DOWN) / top  # a ray is as wide as points are apart
    t, _ = trace(solid.geometry, origin, direction, Width(torch.zeros_like(origin[0]), spread))
    into[:, :3] = (origin + direction * t).t()
    into[:, 3:] = tone_map(radiance(solid, origin, direction, spread)).t()


def _in_order(records: Tensor, world: World) -> Tensor:
    """Sort all ranks' records in training's order and give each rank a range. Sizes differ by some thousandths."""
    grid = common_grid(records[:, :3], world)
    codes, order = torch.sort(interleaved_codes(records[:, :3], grid), stable=True)
    records = records[order]
    del order
    # Each rank's sample stands for equally many of its points.
    at = (torch.arange(_SAMPLES, device=codes.device) * 2 + 1) * len(codes) // (2 * _SAMPLES)
    sample = codes[at].tolist() if len(codes) else [0] * _SAMPLES
    table = all_gather_ints([len(codes), *sample], world)
    pool = sorted((code, counted[0]) for counted in table for code in counted[1:] if counted[0])
    total, before, cuts = sum(weight for _, weight in pool), 0, []
    for code, weight in pool:
        while len(cuts) < world.size - 1 and before * world.size >= (len(cuts) + 1) * total:
            cuts.append(code)
        before += weight
    cuts += [1 << 62] * (world.size - 1 - len(cuts))
    places = torch.searchsorted(codes, torch.tensor(cuts, dtype=torch.int64, device=codes.device)).tolist()
    edges = [0, *places, len(codes)]
    del codes
    send = [end - start for start, end in pairwise(edges)]
    records = exchange_rows(records, send, exchange_counts(send, world), world)
    # Stable, and what came from lower ranks lies first: equal codes are in the order in which they were drawn.
    return records[torch.sort(interleaved_codes(records[:, :3], grid), stable=True).indices]


def _parameters(records: Tensor, spacing: float) -> dict[str, Tensor]:
    count, device = len(records), records.device
    means = records[:, :3].contiguous()
    noise = _Noise(means)
    quats = torch.empty(count, 4, device=device)
    for k in range(4):
        quats[:, k] = noise.next()
    quats[:, 0] += 1.5  # never of length 0
    scales = torch.stack([noise.next().mul_(_UNEVEN) for _ in range(3)], dim=1)
    rest = torch.empty(count, (DEGREE + 1) ** 2 - 1, 3, device=device)
    for column in rest.view(count, rest.shape[1] * 3).unbind(1):
        column.copy_(noise.next().mul_(0.02))
    return {
        "means": means,
        "quats": quats,
        "scales": scales.add_(math.log(_OVERLAP * spacing)),
        "opacities": torch.full((count, 1), math.log(_OPACITY / (1 - _OPACITY)), device=device),
        "features_dc": records[:, 3:].sub(0.5).div_(_DC),
        "features_rest": rest,
    }


class _Noise:
    """Numbers in [-1, 1) that depend on a point's place alone, in integers: the same on any rank."""

    def __init__(self, means: Tensor) -> None:
        x, y, z = (means[:, k].contiguous().view(torch.int32).long() for k in range(3))
        mixed = (x * 0x9E3779B1) ^ (y * 0x85EBCA77) ^ (z * 0xC2B2AE3D)
        self._mixed, self._drawn = mixed ^ (mixed >> 29), 0

    def next(self) -> Tensor:
        """Return [N] numbers, different ones on each call."""
        self._drawn += 1
        return ((self._mixed * (0x2545F491 * self._drawn * 2 + 1) >> 24) & 0xFFFF).float().div_(32768.0).sub_(1.0)
