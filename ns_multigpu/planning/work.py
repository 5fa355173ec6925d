"""Counts of one rank's work in a step, by strategy.

The visible points per view and the tiles per splat depend on the scene. The defaults are those of the largest measured
scene: the garden of Mip-NeRF 360 repeated on a grid (benchmarks/scenes/garden.py). It has 7.93 M points, of which 1.73
M are visible. Each overlaps 3.5 tiles of an image of 1920x1080, and 7.9 of one of 3840x2160 (`counts` in
benchmarks/results/data/kernels/rasterizer-h200.json). gsplat, which bounds splats by squares, counts 5.8 and 14.7.
"""

from dataclasses import dataclass, replace
from math import ceil, log

from ns_multigpu.core.schema import Parameter, floats
from ns_multigpu.planning.simulated import GPUS, SCENES, nearest_scene, simulated
from ns_multigpu.primitives.gaussians.schema import RECORD_FLOATS, ROW, SCHEMA

STRATEGIES = ("single", "batch", "tile", "locality", "pixel")
"""Strategies that can be planned."""

SCENE = "garden repeated on a grid, 7.93 M Gaussians (benchmarks/results/data/kernels/rasterizer-h200.json)"
VISIBLE = 1_734_766 / 7_927_073
_TILES_1080P, _TILES_4K = 6_103_052 / 1_734_766, 13_711_081 / 1_734_018
_PIXELS_1080P, _PIXELS_4K = 1920 * 1080, 3840 * 2160

TILE = 16
"""Side of a tile, and rows of pixels of a band's halo."""
CAPACITY_FACTOR = 1.25
"""Ratio of capacities to measured counts (`step_settings.padded`)."""
UNEVEN = 2.0
"""Ratio of the largest exchanged segment to an equal share. Assumed."""
PATCHES, HALO = 4, 5
"""Patches of `locality` along each side of a view, and the halo in pixels that its loss needs."""

IN_SIGHT = {1: 1.0, 2: 0.672, 4: 0.422, 8: 0.254, 16: 0.152}
"""For `pixel`: mean fraction of a view covered by the cell of one GPU, by the number of GPUs, in the streets of a
simulated city (benchmarks/results/pixel-sim.md). In aerial views it is less.
"""
CROSSES = {2: 0.61, 4: 0.75, 8: 0.94, 16: 1.1}
"""For `pixel`: ratio of the traffic to that of owners that render an average part of their pixels, by the number of
GPUs. Owners are chosen among the ranks that render the most. The value for 2 GPUs was measured (limited-links-h100.md:
54.1 MB per step of an aerial city). The others are the busiest GPU's bytes in streets (pixel-sim.md).
"""
BALANCE_OF_ONE = {1: 1.0, 2: 0.84, 4: 0.67, 8: 0.55, 16: 0.44}
BALANCE = {1: 1.0, 2: 0.86, 4: 0.81, 8: 0.83, 16: 0.78}
"""For `pixel`: mean over maximum of rendered pixels per GPU, by the number of GPUs, in streets (pixel-sim.md).
`BALANCE_OF_ONE` is for one view per step, `BALANCE` for as many views as GPUs, grouped for least conflict.
"""
PIXEL_BYTES = 4 * 4
"""For `pixel`: bytes of a pixel of a cell image, or of its gradients, in a message: colour and alpha."""


@dataclass(frozen=True)
class Workload:
    """Quantities of the run to be planned.

    Attributes:
        points: of the full model.
        width, height: of an image.
        views: views per step, on all GPUs.
        gpus: number of GPUs.
        sh_degree: degree of the harmonics, 0 to 3.
        visible: fraction of the points that a view shows.
        tiles: tiles that a visible splat overlaps.
        fused: True if steps are fused (see docs/internals/kernels.md); otherwise gradients of all parameters are in
        memory.
        compact: True if Adam's moments are bfloat16 instead of float32 (see docs/use/planning.md).
        machines: number of machines, with equally many GPUs each.
        scene: simulated scene for `locality`; auto: the one with the most similar visible fraction.
        schema: the parameters of a point.
    """

    points: int
    width: int
    height: int
    views: int = 1
    gpus: int = 1
    sh_degree: int = 3
    visible: float = VISIBLE
    tiles: float = 0.0
    fused: bool = True
    compact: bool = False
    machines: int = 1
    scene: str = "auto"
    schema: tuple[Parameter, ...] = SCHEMA

    def __post_init__(self) -> None:
        if self.views < 1 or self.gpus < 1:
            raise ValueError(f"{self.views} views a step on {self.gpus} GPUs: give at least 1 of each")
        if self.machines < 1 or self.gpus % self.machines != 0:
            raise ValueError(
                f"{self.gpus} GPUs on {self.machines} machines: gpus counts those of all machines, and each has as many"
            )
        if not 0 <= self.sh_degree <= 3:
            raise ValueError(f"sh-degree is {self.sh_degree}: give 0 to 3")
        if not 0 < self.visible <= 1:
            raise ValueError(f"visible-fraction is {self.visible}: give a part of the points, above 0 and at most 1")
        if self.tiles < 0:
            raise ValueError(f"intersections-per-splat is {self.tiles}: give more than 0")
        if self.compact and not self.fused:
            raise ValueError("optimizer-state is compact, which is for fused steps: leave it out, or --no-fused")
        if self.scene == "auto":
            object.__setattr__(self, "scene", nearest_scene(self.visible))
        if self.scene not in SCENES:
            raise ValueError(f"scene is {self.scene!r}: choose from auto, {', '.join(SCENES)}")
        if self.tiles == 0:
            object.__setattr__(self, "tiles", usual_tiles(self.width * self.height))

    @property
    def pixels(self) -> int:
        """Pixels of an image."""
        return self.width * self.height

    @property
    def per_machine(self) -> int:
        """Number of GPUs of a machine."""
        return self.gpus // self.machines

    @property
    def floats(self) -> int:
        """Numbers of a point."""
        return floats(self.schema, self.sh_degree)

    @property
    def largest(self) -> int:
        """Numbers of a point in its largest parameter."""
        return max(parameter.floats(self.sh_degree) for parameter in self.schema)

    @property
    def moment_bytes(self) -> int:
        """Bytes of one moment of one number."""
        return 2 if self.compact else 4

    def with_points(self, points: int) -> "Workload":
        """Return the same run with another number of points."""
        return replace(self, points=points)


@dataclass(frozen=True)
class Share:
    """Work of one rank in a step; of the busiest rank if they differ.

    Attributes:
        points: points that the rank holds.
        views: views into which it projects its points.
        rows: splats of its own points in all its views.
        received_rows: rows that it receives and renders, padding included (`tile`); 0 if it renders its own.
        drawn: rows that it renders.
        intersections, pixels: of the rendered rows and patches, halos included.
        updated: rows whose gradients update its points.
        touched: points with any of these rows.
        traffic: bytes received from other ranks, forward and backward.
        traffic_padded: the same by collectives, which send less of a row; `batch` sends full capacities.
        between: fraction of the traffic that comes from other machines.
        layers: pixels of cell images that it composites (`pixel`); 0 if pixels are local.
    """

    points: int
    views: int
    rows: float
    received_rows: float
    drawn: float
    intersections: float
    pixels: float
    updated: float
    traffic: float
    traffic_padded: float
    between: float = 0.0
    layers: float = 0.0
    touched: float = 0.0


def usual_tiles(pixels: int) -> float:
    """Return the tiles that a visible splat overlaps in the measured scene, for an image size. It is linear through the
    two measured sizes.
    """
    slope = (_TILES_4K - _TILES_1080P) / (_PIXELS_4K - _PIXELS_1080P)
    return _TILES_1080P + slope * (pixels - _PIXELS_1080P)


def ranks_used(strategy: str, workload: Workload) -> int:
    """Return the number of GPUs that the strategy uses."""
    return 1 if strategy == "single" else workload.gpus


def batch_of(strategy: str, workload: Workload) -> int:
    """Return the views per step: `batch` gives each rank equally many full views, at least one."""
    return ceil(workload.views / workload.gpus) * workload.gpus if strategy == "batch" else workload.views


def share(strategy: str, workload: Workload) -> Share:
    """Return the work of a rank in a step of `strategy`, if views show points independently of each other.

    Raises:
        ValueError: the strategy cannot be planned.
    """
    found = _share(strategy, workload)
    return replace(found, touched=found.points * (1 - (1 - workload.visible) ** batch_of(strategy, workload)))


def _share(strategy: str, workload: Workload) -> Share:
    ranks = ranks_used(strategy, workload)
    seen = workload.points * workload.visible
    off_machine = (ranks - workload.per_machine) / (ranks - 1) if ranks > 1 else 0.0  # of the other ranks
    if strategy in ("single", "batch"):
        views = batch_of(strategy, workload) // ranks
        rows = seen * views
        others = rows * (ranks - 1)
        return Share(
            workload.points, views, rows, 0.0, rows, rows * workload.tiles, float(workload.pixels * views),
            rows * ranks,
            PUT_BYTES * others, CAPACITY_FACTOR * ROW_BYTES * others, off_machine,
        )  # fmt: skip
    if strategy == "locality":
        return _locality(workload)
    if strategy == "pixel":
        return _pixel(workload, off_machine)
    if strategy != "tile":
        raise ValueError(f"there is no plan for the strategy {strategy!r}: choose from {', '.join(STRATEGIES)}")
    part = workload.views / ranks
    # If views are cut, a band is rendered with one more row of tiles on either side.
    cut = ranks > 1 and workload.views % ranks != 0
    halo = 1 + 2 * TILE / (workload.height * part) if cut else 1.0
    rows, drawn = seen * part, min(seen * part * halo, seen * workload.views)
    received_rows = min(UNEVEN * drawn, seen * workload.views) if ranks > 1 else drawn
    exchanged_bytes = 2 * RECORD_BYTES * (ranks - 1) / ranks
    return Share(
        ceil(workload.points / ranks), workload.views, rows, received_rows, drawn, drawn * workload.tiles,
        min(workload.pixels * part * halo, float(workload.pixels * workload.views)), rows, exchanged_bytes * drawn,
        (WIRE_BYTES + GRADIENT_BYTES) * (ranks - 1) / ranks * drawn, off_machine,
    )  # fmt: skip


def in_sight(gpus: int) -> float:
    """Return `IN_SIGHT` for any number of GPUs."""
    return _between(IN_SIGHT, gpus)


def _between(known: dict[int, float], gpus: int) -> float:
    """Return the value for a number of GPUs, interpolated and extrapolated as a power of that number."""
    numbers = sorted(known)
    above = next((n for n in numbers[1:] if n >= gpus), numbers[-1])
    below = numbers[numbers.index(above) - 1]
    slope = log(known[above] / known[below]) / log(above / below)
    return known[below] * (gpus / below) ** slope


def _pixel(workload: Workload, off_machine: float) -> Share:
    """Return the work of a rank with one cell, which renders its part of all views' splats and owns its part of the
    pixels. Every view is assumed to show each cell alike, except for `CROSSES` and `BALANCE`.
    """
    ranks = workload.gpus
    rows = workload.points * workload.visible * workload.views / ranks
    if ranks == 1:
        return _share("tile", replace(workload, machines=1))
    cut = workload.views % ranks != 0
    owned = workload.pixels * workload.views / ranks
    seen = in_sight(ranks)
    drawn = seen * workload.pixels * workload.views
    most = 1 / _balance(workload.views, ranks)
    layers = ranks * seen * owned * (1 + (2 * 2 * HALO * workload.width / owned if cut else 0.0))
    exchanged_bytes = _between(CROSSES, ranks) * PIXEL_BYTES * (ranks - 1) / ranks * (layers + drawn)
    return Share(
        ceil(workload.points / ranks), workload.views, rows, 0.0, most * rows, most * rows * workload.tiles,
        most * drawn,
        rows, exchanged_bytes, exchanged_bytes, off_machine, layers,
    )  # fmt: skip


def _balance(views: int, ranks: int) -> float:
    """Return `BALANCE` for a number of views per step, interpolated in its logarithm between one view and one per
    GPU.
    """
    one, many = _between(BALANCE_OF_ONE, ranks), _between(BALANCE, ranks)
    return one + (many - one) * min(log(views) / log(ranks), 1.0)


def _locality(workload: Workload) -> Share:
    """Return the work of `tile` with patches on the ranks of their points; savings and balance were simulated."""
    ranks, per_machine = workload.gpus, workload.per_machine
    level = simulated(workload.scene, workload.machines)
    seen, part = workload.points * workload.visible, workload.views / ranks
    patches = PATCHES**2 * workload.views if ranks > 1 else workload.views
    each = ceil(ceil(patches / workload.machines) / per_machine)
    width, height = (
        (workload.width, workload.height) if ranks == 1 else (workload.width / PATCHES, workload.height / PATCHES)
    )
    halo = 2 * HALO if ranks > 1 else 0
    around = (width + halo) * (height + halo) / (width * height)
    drawn = min(seen * part * around * level.draws, seen * workload.views)
    # Fractions of a rank's rows sent to other machines, and to other GPUs of its own; they depend on the number of
    # both.
    off_machine_share = (workload.machines - 1) / workload.machines * (1 - level.between)
    there = GPUS * workload.machines
    in_machine_share = (
        ((there - 1) / there * (1 - level.in_all) - off_machine_share) * (1 - 1 / per_machine) / (1 - 1 / GPUS)
    )
    busiest = seen * part * (off_machine_share + in_machine_share) * max(level.sends, level.receives)
    off_machine = off_machine_share / (off_machine_share + in_machine_share) if ranks > 1 else 0.0
    return Share(
        ceil(workload.points / ranks * level.holds), workload.views, seen * part * level.sends,
        min(UNEVEN * drawn, seen * workload.views) if ranks > 1 else drawn, drawn, drawn * workload.tiles,
        each * (width + halo) * (height + halo), seen * part * level.sends, 2 * RECORD_BYTES * busiest,
        (WIRE_BYTES + GRADIENT_BYTES) * busiest, off_machine,
    )  # fmt: skip


RECORD_BYTES = 4 * RECORD_FLOATS
"""Bytes of a row, or its gradients, in peer memory with `tile` (`cuda_ext.ops.exchange.row_exchange`)."""
WIRE_BYTES, GRADIENT_BYTES = 4 * 12, 4 * 11
"""Bytes of a row, and of its gradients with absolute ones, in collectives (`cuda_ext.ops.exchange.row_wire`)."""
ROW_BYTES = 4 * (2 + ROW["radii"] + ROW["conics"]) + RECORD_BYTES
"""Bytes of a row (ids, radii, conic) and its gradients in the collectives of `batch`."""
PUT_BYTES = ROW_BYTES - 4 * (RECORD_FLOATS - 12)
"""As `ROW_BYTES`, through peer memory: without the record's padding."""
