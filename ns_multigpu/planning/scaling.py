"""Costs of `locality` that grow with the number of ranks, by arithmetic: docs/internals/scaling.md has the table.

Rates are measured; their sources stand next to them. What they give beyond 128 ranks is extrapolated.
"""

from dataclasses import dataclass

from ns_multigpu.planning.memory import checkpoint_bytes
from ns_multigpu.planning.rates import BACKWARD, RASTER, SORT
from ns_multigpu.planning.work import GRADIENT_BYTES, WIRE_BYTES, Workload

_SIM = "benchmarks/results/locality-sim.md"
PATCHES = 16
"""Patches of a view."""
PLAN_MS, PLAN_RANKS, PLAN_POWER = 26.8, 32, 2.18
"""Milliseconds of a plan with 2 views of 16 patches a rank, and its growth with the ranks, from 32, 64 and 128 ranks
(`_SIM`, aerial)."""
COUNT_MS = 0.18
"""Milliseconds of one core for counting a view's 16 patches in a sample of 4 million points (`_SIM`)."""
REGIONS = {"aerial": (3.64 - 1.03, 0.609 - 0.076), "street-far-plane": (3.89 - 1.05, 0.596 - 0.151)}
"""Regions of METIS within a machine compared with round-robin: how much more of the mean the busiest GPU draws, and the
fraction of all exchanged rows that they save (`_SIM`)."""


@dataclass(frozen=True)
class Scale:
    """Costs on so many ranks.

    Attributes:
        plan_ms: of a step's plan, one thread. Each rank computes all plans.
        counting_s: CPU seconds of counting for a placement, on rank 0.
        needs_bytes: what each patch of each training view needs from each rank, on every rank and in checkpoints.
        peers, flat_peers: ranks that a rank sends to in a step, with forwarding and without.
        image_bytes: of training images on a rank.
        rank_checkpoint_bytes, checkpoint_bytes: of one rank, and of all.
    """

    plan_ms: float
    counting_s: float
    needs_bytes: int
    peers: int
    flat_peers: int
    image_bytes: float
    rank_checkpoint_bytes: float
    checkpoint_bytes: int


def scale_of(workload: Workload, captured: int) -> Scale:
    """Return the costs of a run with so many training views, of 3 bytes a pixel."""
    ranks, saved = workload.gpus, checkpoint_bytes(workload)
    peers, flat = workload.per_machine - 1 + workload.machines - 1, ranks - 1
    return Scale(
        plan_ms=PLAN_MS * (ranks / PLAN_RANKS) ** PLAN_POWER,
        counting_s=COUNT_MS * captured / 1e3,
        needs_bytes=4 * captured * PATCHES * ranks,
        peers=peers,
        flat_peers=flat,
        image_bytes=3 * workload.pixels * captured / ranks,
        rank_checkpoint_bytes=saved / ranks,
        checkpoint_bytes=saved,
    )


def regions_pay_below(scene: str, tiles: float) -> float:
    """Return the bytes per millisecond of a GPU's links within a machine, below which regions of METIS would be faster
    there than round-robin.

    A row that is drawn costs its share of sorting and rasterization; one that is exchanged crosses and returns.

    Args:
        scene: of `REGIONS`. tiles: that a visible splat overlaps.
    """
    busier, saved = REGIONS[scene]
    of_tile = SORT.intersections + RASTER.intersections + BACKWARD.intersections
    return saved * (WIRE_BYTES + GRADIENT_BYTES) / (busier * (RASTER.rows + tiles * of_tile) / 1e6)
