"""Measured rates and their sources. Every time of a plan follows from these and from the counts in `work`.

A kernel's time is a sum of terms, each a count times a rate. The rates are non-negative least-squares fits of relative
errors to the kernels and parts of steps timed on an H200: the garden of `rasterizer-h200.json` and
`train-step-h200.json` (0.07 to 7.93 million Gaussians) and the city of `tile-h200-x4.json` (2 to 50 million a GPU,
1080p to 8K). tests/planning/test_planning_measured.py compares whole steps with the measured ones: all lie within 15 %.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: as its driver says it.
        memory: bytes that a process may have, about.
        slowness: the time of its kernels beside an H200's.
    """

    name: str
    memory: int
    slowness: float


GPUS = {"h200": Gpu("NVIDIA H200", 139 << 30, 1.0), "h100": Gpu("NVIDIA H100", 79 << 30, 1.14)}
"""By the name that a user types. H100: `tile` on two of them, 2 and 8 million Gaussians
(benchmarks/results/limited-links-h100.md)."""

_RASTERIZER = "benchmarks/results/data/kernels/rasterizer-h200.json"
_STEP = "benchmarks/results/data/kernels/train-step-h200.json"
_TILE = "benchmarks/results/data/scaling/tile-h200-x4.json"
_LINKS = "benchmarks/results/tile-h200.md"
_LIMITED = "benchmarks/results/limited-links-h100.md"


@dataclass(frozen=True)
class Rate:
    """Milliseconds as a sum of terms.

    Attributes:
        source: the file that the rates are from.
        points, rows, intersections, pixels: milliseconds a million of each.
        fixed: milliseconds, whatever the counts.
    """

    source: str
    points: float = 0.0
    rows: float = 0.0
    intersections: float = 0.0
    pixels: float = 0.0
    fixed: float = 0.0

    def ms(self, points: float = 0.0, rows: float = 0.0, intersections: float = 0.0, pixels: float = 0.0) -> float:
        """Return the time that so many of each take."""
        terms = points * self.points + rows * self.rows + intersections * self.intersections + pixels * self.pixels
        return terms / 1e6 + self.fixed


PROJECT = Rate(_RASTERIZER, points=0.0065, rows=0.153, fixed=0.007)
"""Culling of all points; projection and harmonics of the rows. A point costs the 28 bytes that culling reads."""
PROJECT_LAZY = Rate(_TILE, points=0.0162, rows=0.248, fixed=0.011)
"""The same where Adam's steps are deferred: a row's point is brought up to date first."""
SORT = Rate(_TILE, intersections=0.0254, fixed=0.106)
"""Intersection with tiles, and both sorts."""
RASTER = Rate(_TILE, rows=0.126, intersections=0.0627, pixels=0.0207, fixed=0.093)
"""Forward pass of the rasterization."""
LOSS = Rate(_TILE, pixels=0.0559, fixed=0.022)
"""L1, SSIM and their gradient."""
BACKWARD = Rate(_TILE, intersections=0.263, pixels=0.0705, fixed=0.089)
"""Backward pass of the rasterization, with absolute gradients, which training asks for."""
UPDATE = Rate(_STEP, points=0.319, rows=0.321)
"""Dense: Adam's step of all points; gradients through projection of the points that any view drew (`rows`)."""
UPDATE_LAZY = Rate(_TILE, rows=0.84, fixed=0.014)
"""Deferred: both of the points that any view drew."""
FLUSH = Rate(_STEP, points=0.357)
"""Deferred steps, taken once a block."""
LAZY_BELOW = 0.35
"""Training defers steps where a step draws less than this part of the points: see NOTES.md of the benchmarks."""
BLOCK = 50
"""Steps of a block, in the run that `FLUSH` is of."""

HOST = 0.6
"""Milliseconds that the host needs for a step on one GPU, at least (whole-runs.md, the fox's small steps)."""
HOST_OF_MANY = 0.75
"""The same on several GPUs of a machine (there)."""


@dataclass(frozen=True)
class Link:
    """A way of sending.

    Attributes:
        source: the file that the figures are from.
        bytes_per_ms: that a GPU receives, or sends, at most.
        fixed: milliseconds a step, whatever is sent.
    """

    source: str
    bytes_per_ms: float
    fixed: float

    def ms(self, size: float) -> float:
        """Return the time that a step's `size` bytes take into, or out of, one GPU."""
        return size / self.bytes_per_ms + self.fixed


PEER = Link(_TILE, 250e6, 0.06)
"""Peer memory inside a step, both ways: 58 to 71 % of what a copy reaches. The fixed part are barriers."""
COLLECTIVE = Link(_LINKS, 292e6, 1.0)
"""NCCL's all-to-all. The fixed part: a step's graph is cut where the host launches collectives, and its rows are packed
(`tile` by collectives beside peer memory in tile-h200.md: 0.95 to 1.2 ms)."""
COMPOSITE = Rate(_LIMITED, pixels=0.07)
"""Packing, sorting and compositing of cells' layers (`pixel`), a million pixels drawn or received."""
NETWORK = 0.9
"""The part of a link's rate that a step reaches (limited-links-h100.md, sockets held to 10 and 25 Gbit/s)."""
