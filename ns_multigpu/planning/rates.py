"""Measured rates and their sources. Every time of a plan follows from these and from the counts in `work`.

A kernel's time is a sum of terms, each a count times a rate. The rates are non-negative least-squares fits of relative
errors to the kernels and parts of steps timed on an H200. The scenes are the garden of `rasterizer-h200.json` and
`train-step-h200.json` (0.07 to 7.93 million Gaussians) and the city of `tile-h200-x4.json` (2 to 50 million per GPU,
1080p to 8K). tests/planning/test_planning_measured.py compares full steps with the measured ones: all are within 15 %.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """GPU model.

    Attributes:
        name: as reported by the driver.
        memory: approximate bytes available to a process.
        slowness: kernel time relative to an H200.
    """

    name: str
    memory: int
    slowness: float


GPUS = {"h200": Gpu("NVIDIA H200", 139 << 30, 1.0), "h100": Gpu("NVIDIA H100", 79 << 30, 1.14)}
"""GPU models by option value. H100: `tile` on two of them, 2 and 8 million Gaussians
(benchmarks/results/limited-links-h100.md).
"""

_RASTERIZER = "benchmarks/results/data/kernels/rasterizer-h200.json"
_STEP = "benchmarks/results/data/kernels/train-step-h200.json"
_TILE = "benchmarks/results/data/scaling/tile-h200-x4.json"
_LINKS = "benchmarks/results/tile-h200.md"
_LIMITED = "benchmarks/results/limited-links-h100.md"


@dataclass(frozen=True)
class Rate:
    """Milliseconds as a sum of terms.

    Attributes:
        source: file of the measurements.
        points, rows, intersections, pixels: milliseconds per million of each.
        fixed: milliseconds, independent of the counts.
    """

    source: str
    points: float = 0.0
    rows: float = 0.0
    intersections: float = 0.0
    pixels: float = 0.0
    fixed: float = 0.0

    def ms(self, points: float = 0.0, rows: float = 0.0, intersections: float = 0.0, pixels: float = 0.0) -> float:
        """Return the milliseconds for these counts."""
        terms = points * self.points + rows * self.rows + intersections * self.intersections + pixels * self.pixels
        return terms / 1e6 + self.fixed


PROJECT = Rate(_RASTERIZER, points=0.0065, rows=0.153, fixed=0.007)
"""Culling of all points; projection and harmonics of the rows. A point costs the 28 bytes that culling reads."""
PROJECT_LAZY = Rate(_TILE, points=0.0162, rows=0.248, fixed=0.011)
"""As `PROJECT`, with deferred Adam steps: a row's point is updated first."""
SORT = Rate(_TILE, intersections=0.0254, fixed=0.106)
"""Intersection with tiles, and both sorts."""
RASTER = Rate(_TILE, rows=0.126, intersections=0.0627, pixels=0.0207, fixed=0.093)
"""Forward pass of the rasterization."""
LOSS = Rate(_TILE, pixels=0.0559, fixed=0.022)
"""L1, SSIM and their gradient."""
BACKWARD = Rate(_TILE, intersections=0.263, pixels=0.0705, fixed=0.089)
"""Backward pass of the rasterization, with absolute gradients, which training needs."""
UPDATE = Rate(_STEP, points=0.319, rows=0.321)
"""Dense update: Adam's step of all points; gradients through projection of points visible in any view (`rows`)."""
UPDATE_LAZY = Rate(_TILE, rows=0.84, fixed=0.014)
"""Deferred update: both, only for points visible in any view."""
FLUSH = Rate(_STEP, points=0.357)
"""Deferred Adam steps, applied once per block."""
LAZY_BELOW = 0.35
"""Steps are deferred if a step renders less than this fraction of the points: see NOTES.md of the benchmarks."""
BLOCK = 50
"""Steps per block in the run that `FLUSH` was measured in."""

HOST = 0.6
"""Least milliseconds of the host per step on one GPU (whole-runs.md, the fox's small steps)."""
HOST_OF_MANY = 0.75
"""Least milliseconds of the host per step on several GPUs of a machine (same source)."""


@dataclass(frozen=True)
class Link:
    """Transport between GPUs.

    Attributes:
        source: file of the measurements.
        bytes_per_ms: largest rate at which a GPU receives, or sends.
        fixed: milliseconds per step, independent of the size.
    """

    source: str
    bytes_per_ms: float
    fixed: float

    def ms(self, size: float) -> float:
        """Return the milliseconds in which one GPU receives, or sends, a step's `size` bytes."""
        return size / self.bytes_per_ms + self.fixed


PEER = Link(_TILE, 250e6, 0.06)
"""Peer memory inside a step, both directions: 58 to 71 % of a copy's rate. Barriers are the fixed part."""
COLLECTIVE = Link(_LINKS, 292e6, 1.0)
"""NCCL's all-to-all. Fixed part: collectives split a step's graph, and its rows are packed (`tile` by collectives
compared with peer memory in tile-h200.md: 0.95 to 1.2 ms).
"""
COMPOSITE = Rate(_LIMITED, pixels=0.07)
"""Packing, sorting and compositing of cell images (`pixel`), per million pixels rendered or received."""
NETWORK = 0.9
"""Fraction of a link's rate that a step uses (limited-links-h100.md, sockets limited to 10 and 25 Gbit/s)."""
