"""Measured rates, and where each was measured. Times of a plan follow from these and from nothing else.

A kernel's time is taken as a sum of terms, each a count times a rate. The rates are least-squares fits (of relative
errors, none negative) to the four scenes of `benchmarks/results/rasterizer-h200.json` and `train-step-h200.json`, 0.07
to 7.93 million Gaussians at 1080p and 4K, the loss's to a whole view of either size in `tile-h200-x2-graphs.json`; they
miss none of them by more than 10 % (tests/test_planning.py). Beyond those sizes they are extrapolated.
"""

from dataclasses import dataclass

GPU = "NVIDIA H200"
"""What all the rates are of."""
MEMORY = 139 << 30
"""Bytes of its memory that a process may have, about. On a machine with a GPU a plan asks that instead."""

_RASTERIZER = "benchmarks/results/rasterizer-h200.json"
_STEP = "benchmarks/results/train-step-h200.json"
_TILE = "benchmarks/results/tile-h200-x2-graphs.json"
_LINKS = "benchmarks/results/links-h200.md"


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
        """The time that so many of each take."""
        terms = points * self.points + rows * self.rows + intersections * self.intersections + pixels * self.pixels
        return terms / 1e6 + self.fixed


PROJECT = Rate(_RASTERIZER, points=0.0402, fixed=0.014)
"""Culling, projection, harmonics; measured with 22 % of the points visible."""
PROJECT_LAZY = Rate(_STEP, points=0.0632, fixed=0.022)
"""The same, where the steps of points that are not drawn are put off."""
SORT = Rate(_RASTERIZER, rows=0.0808, intersections=0.0283, fixed=0.107)
"""Intersection with tiles, and both sorts."""
RASTER = Rate(_RASTERIZER, rows=0.395, intersections=0.0309, fixed=0.139)
LOSS = Rate(_TILE, pixels=0.0567, fixed=0.028)
BACKWARD = Rate(_RASTERIZER, intersections=0.202, pixels=0.0709, fixed=0.170)
"""Of the rasterizer, with absolute gradients, which training asks for."""
UPDATE = Rate(_STEP, points=0.388, fixed=0.013)
"""Dense: the way back through projection, and Adam's step of all points."""
UPDATE_LAZY = Rate(_STEP, rows=0.87, fixed=0.011)
"""Of the rows that were drawn, the other points' steps being put off; the two large scenes."""
FLUSH = Rate(_STEP, points=0.357)
"""What was put off, taken once a block."""
LAZY_BELOW = 0.35
"""Training puts steps off where a step draws less than this part of the points: see NOTES.md of the benchmarks."""
BLOCK = 50
"""Steps of a block, in the run that `FLUSH` is of."""

HOST = 0.8
"""Milliseconds that the host needs for a step on one GPU, at least: small steps take no less (whole-runs.md)."""
HOST_OF_MANY = 1.5
"""The same on several GPUs, where steps are small."""


@dataclass(frozen=True)
class Link:
    """What crosses the wire.

    Attributes:
        source: the file that the figures are from.
        bytes_per_ms: that a GPU receives, or sends, at most.
        fixed: milliseconds of a small message.
    """

    source: str
    bytes_per_ms: float
    fixed: float

    def ms(self, size: float) -> float:
        """The time that `size` bytes take into, or out of, one GPU."""
        return size / self.bytes_per_ms + self.fixed


COLLECTIVE = Link(_LINKS, 292e6, 0.028)
"""NCCL's all-to-all; its all-gather is taken to be as fast."""
PEER = Link(_LINKS, 372e6, 0.010)
"""Peer memory, read; writing is a little faster (390). The fixed part, a barrier, is a guess."""
