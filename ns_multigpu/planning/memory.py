"""Memory of one GPU, by part: allocations of a `Step`, its CUDA operators, and densification.

Every figure counts the bytes of buffers in the code named next to it. On the four measured scenes the sum is within 2 %
of the allocator's peak (benchmarks/results/data/kernels/train-step-h200.json; see tests/planning/test_planning.py).
"""

from dataclasses import dataclass

from ns_multigpu.planning.work import (
    CAPACITY_FACTOR,
    RECORD_BYTES,
    ROW_BYTES,
    WIRE_BYTES,
    Share,
    Workload,
    ranks_used,
    share,
)
from ns_multigpu.primitives.gaussians.schema import ROW

# Bytes per point.
STATISTICS = 12  # grad2d, count, radii
LAZY = 1  # LazyAdam.last
_INDICES = 40  # indices of new points, and their order
# Bytes per row that is projected on this rank.
_ROWS = 4 * (2 + sum(ROW.values()))  # SplatRows: with two ids
_KEPT_ROWS = _ROWS  # the previous step's rows, until the new ones exist
# Bytes per row that is rendered on this rank.
_TABLE = 48  # RasterState.table
_RECORDS = RECORD_BYTES + 8  # gradients, owners, slots
_GATHERED = ROW_BYTES + 4 * ROW["features"]  # of every rank; and colours (see GaussianReplicaRows)
_RECEIVED_ROW = 4 * (3 + sum(ROW.values()))  # with view ids, owners and slots
# Bytes per intersection: row_ids, and checkpoints of transmittance and colour. Sorted keys and ids are freed by
# then: 12 (16 beyond 65,535 tiles), of which row_ids are 4.
_INTERSECTION = 20
# Bytes per pixel during the loss: target 3, rgb of this step and the last 24, colour, alpha, last 20, the loss's
# gradient 12 and its maps 36.
_PIXEL = 95
_PER_TILE = 40  # of 256 pixels: TileInfo, offsets, slots
# State of the placement of `locality`: the place of a point (`ShardIndex`). During placement, one GPU holds for each
# sample its position, also in double precision, its cells, its code and its rank in their order (`ByViews`). `pixel`
# has places as well.
_PLACE = 8
_LAYER = 4 * (4 + 1 + 4)  # received pixel, transmittance before it, its gradients
_SENT = 4 * (4 + 4 + 4)  # per rendered pixel: sent, returned, and its gradients in the patch
_SAMPLE = 12 + 24 + 48 + 8 + 16 + 24
MOST_SAMPLED = 4_000_000

RESERVE = 2 << 30
"""Bytes of the CUDA context, kernels and NCCL's channels. Assumed."""
SLACK = 0.05
"""Fraction of a GPU's memory lost to fragmentation. Assumed."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        parameters, moments, statistics: of the model.
        gradients: of all parameters, if steps are not fused.
        rows, intersections, pixels, exchange: buffers of a step.
        images: training images kept on the GPU.
        placement: index map of points, with `locality` and `pixel`.
        refining: memory of densification next to the model, instead of a step's buffers: old tensors while new ones are
            built (`regroup.grow_and_prune`).
        reserve: for CUDA, and the allocator's fragmentation.
        available: of the GPU.
    """

    parameters: float
    moments: float
    statistics: float
    gradients: float
    rows: float
    intersections: float
    pixels: float
    exchange: float
    images: float
    placement: float
    refining: float
    reserve: float
    available: float

    @property
    def model(self) -> float:
        """Bytes that are allocated throughout training."""
        return self.parameters + self.moments + self.statistics + self.gradients + self.images + self.placement

    @property
    def step(self) -> float:
        """Bytes of a step's buffers."""
        return self.rows + self.intersections + self.pixels + self.exchange

    @property
    def training(self) -> float:
        """Peak during a step."""
        return self.model + self.step + self.reserve

    @property
    def densifying(self) -> float:
        """Peak during densification."""
        return self.model + self.refining + self.reserve

    def headroom(self, *, densify: bool) -> float:
        """Return the free bytes; negative if the run does not fit."""
        return self.available - (max(self.training, self.densifying) if densify else self.training)


def memory(strategy: str, workload: Workload, available: float, images: float = 0.0) -> Memory:
    """Return the memory of one rank of `strategy`.

    Args:
        available: bytes of a GPU.
        images: bytes of training images on it.
    """
    one, ranks = share(strategy, workload), ranks_used(strategy, workload)
    numbers = float(workload.floats * one.points)
    parameters = 4.0 * numbers
    buffers = step_buffers(one, ranks)
    # Tensors are replaced one by one. The peak has the old value and an old moment of the largest, all new tensors, and
    # indices, masks and positions of all points. A sharded model also keeps its exchange buffers.
    largest = (4.0 + workload.moment_bytes) * workload.largest
    refining = (largest + _INDICES) * one.points + (buffers["exchange"] if one.received_rows else 0.0)
    placement = 0.0
    if strategy in ("locality", "pixel") and ranks > 1:
        placement = float(_PLACE * one.points)
    if strategy == "locality" and ranks > 1:
        refining = max(refining, float(_SAMPLE * min(workload.points, MOST_SAMPLED)))  # before any tensor is replaced
    return Memory(
        parameters=parameters,
        moments=2 * workload.moment_bytes * numbers,
        statistics=float((STATISTICS + LAZY) * one.points),
        gradients=0.0 if workload.fused else parameters,
        **buffers,
        images=images,
        placement=placement,
        refining=refining,
        reserve=RESERVE + SLACK * available,
        available=available,
    )


def checkpoint_bytes(workload: Workload) -> int:
    """Return the bytes of a checkpoint of the full model: parameters, moments, densification statistics."""
    return workload.points * ((4 + 2 * workload.moment_bytes) * workload.floats + STATISTICS)


def step_buffers(one: Share, ranks: int, *, capacity: float = CAPACITY_FACTOR) -> dict[str, float]:
    """Return the bytes of a step's buffers: `rows`, `intersections`, `pixels` and `exchange`.

    Args:
        capacity: ratio of capacities to counts.
    """
    rows = capacity * one.rows
    if one.received_rows:  # rows are exchanged: `CollectiveRows` or `PeerRows`
        received_rows = capacity * one.received_rows
        on_rows = rows * (_ROWS + _KEPT_ROWS + 4 * ranks) + received_rows * (_RECEIVED_ROW + _TABLE)
        # Collectives take more than peer memory: per received row its data and the sum of its gradients, as much again
        # for
        # sent rows, and twice the gathered rows.
        exchange = received_rows * (2 * WIRE_BYTES + RECORD_BYTES + 8) + 2 * RECORD_BYTES * rows
    else:  # rows are local: `OwnRows` or `ReplicatedRows`
        on_rows = rows * (_ROWS + _KEPT_ROWS + _TABLE + _RECORDS)
        # The rows of all ranks, and this rank's view ids: the rest is sent in place.
        exchange = rows * (ranks * _GATHERED + 4) if ranks > 1 else 0.0
        if one.layers:  # pixels are exchanged instead of rows: `CompositeOperators`
            exchange = _LAYER * one.layers + _SENT * one.pixels
    return {
        "rows": on_rows,
        "intersections": _INTERSECTION * capacity * one.intersections,
        "pixels": one.pixels * (_PIXEL + _PER_TILE / 256),
        "exchange": exchange,
    }


def most_points(strategy: str, workload: Workload, available: float, *, densify: bool, images: float = 0.0) -> int:
    """Return the points of the largest model that fits, with everything else as in `workload`; 0 if nothing fits."""

    def fits(points: int) -> bool:
        return memory(strategy, workload.with_points(points), available, images).headroom(densify=densify) >= 0

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
