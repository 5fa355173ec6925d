"""Settings of a step, its status, and its initial capacities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cuda_ext.ops.optim.step_control import HEAD
from ns_multigpu.core.assign.assignment import Assignment
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.exchange.pair_capacities import Pairs
from ns_multigpu.core.step.view_parameters import words_of
from ns_multigpu.core.types import SSIM_HALO, TILE, Patch, Sizes, View, sizes_of

HALO = TILE
"""Halo of a drawn patch in pixels: enough for the loss, and tiles stay those of the image."""
assert HALO >= 2 * SSIM_HALO
GROUPS_FROM = 24 << 20
"""Points of a rank times the views that it splats them for, from which on groups are culled by their boxes. On an H200
that saves 3 to 7 % of projecting one view, and 7 to 31 % of projecting 16 or 64; keeping boxes right takes 0.02 ms of
the update of 8 million points (benchmarks/results/group-culling.md). With less to test it gains nothing."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of a step besides parameters, cameras, plan and kernels; a change of any requires a new `Step`.

    Attributes:
        width, height: the most of any view, pixels.
        views: of the batch.
        ssim_lambda: see `photometric_loss`.
        rows: capacity of a rank's own rows.
        segment: capacity in rows of each pair of ranks, or one for all, if rows are exchanged.
        intersections: capacity of what a rank draws.
        view_numbers: of each view's trained `ViewParameters`; 0 without.
        poses: True if each view has a trained pose correction (see `StepPoses`).
        alpha: whether photographs have an alpha channel. masks: channels of their masks: see `photograph`.
        depth_weight: of the loss of depth (see `core.step.depth_loss`); 0 for none.
        normal_weight: of the loss of normal maps by the normals of depth (see `core.step.normal_map_loss`).
        sky_weight: of the loss of the sky (see `core.step.loss`), the second channel of masks.
        skips: True if a step whose gradients are not finite leaves the model unchanged.
        intrinsics_rows: of a view's `K`: 3, or 7 with lenses.
    """

    width: int
    height: int
    views: int
    ssim_lambda: float
    rows: int
    segment: int | Pairs
    intersections: int
    view_numbers: int = 0
    poses: bool = False
    alpha: bool = False
    masks: int = 0
    depth_weight: float = 0.0
    normal_weight: float = 0.0
    sky_weight: float = 0.0
    skips: bool = False
    intrinsics_rows: int = 3

    @property
    def channels(self) -> int:
        """Channels of a photograph: colour, alpha, mask, sky."""
        return 3 + self.alpha + self.masks

    @property
    def has_indices(self) -> bool:
        """True if a step's inputs hold the views' indices."""
        return self.view_numbers > 0 or self.poses

    @property
    def tile_rows(self) -> int:
        """Maximum rows of tiles of a view."""
        return -(-self.height // TILE)

    def words(self, assignment: Assignment | None = None) -> int:
        """Return the length of a rank's statistics: `HEAD`, the counts that the assignment reads, and `tail`."""
        learns = assignment.counts(self.views, self.width, self.height) if assignment is not None else 0
        return HEAD + learns + self.tail

    @property
    def tail(self) -> int:
        """Words at the end of a message: of the views' parameters."""
        return words_of(self.views, self.view_numbers)


@dataclass(frozen=True)
class Status:
    """Progress of the steps since the last readback.

    Attributes:
        done: steps that were taken.
        rows, intersections: the most that any rank had in any of them, taken or not.
        segments: by rank, the most rows that this one had for each (also itself) in any of them. `all_gather_counts`
            publishes those of all pairs.
        full: whether a capacity was exceeded, a lazy step waits for a flush, or a step is skipped; later steps have
            waited.
        sent: rows that this rank sent to other ranks.
    """

    done: int
    rows: int
    segments: tuple[int, ...]
    intersections: int
    full: bool
    sent: int


def with_halos(plan: Plan, views: Sequence[View]) -> Plan:
    """Return the batch's plan with the halos that a `Step` needs. A whole view has none."""
    return _with_halos(plan, sizes_of(views))


@lru_cache(maxsize=64)
def _with_halos(plan: Plan, sizes: Sizes) -> Plan:
    def with_halo(patch: Patch) -> Patch:
        whole = (patch.x0, patch.y0, patch.x1, patch.y1) == (0, 0, *sizes[patch.view])
        return Patch(patch.view, patch.x0, patch.y0, patch.x1, patch.y1, 0 if whole else HALO)

    if plan.order:  # a halo of exchanged pixels: no tile is drawn for it alone
        owned = [[replace(with_halo(p), halo=min(with_halo(p).halo, 2 * SSIM_HALO)) for p in of] for of in plan.owned]
        return replace(plan, owned=tuple(map(tuple, owned)))
    return Plan.of(*([map(with_halo, patches) for patches in of_ranks] for of_ranks in (plan.drawn, plan.owned)))


def padded(count: int) -> int:
    """Return a capacity for `count` rows or intersections, with spare for growth."""
    return max(1024, -(-int(count * 1.25) // 1024) * 1024)


def first_capacities(points: int, pixels: int, views: int, *, is_exchanged: bool) -> tuple[int, int, int]:
    """Return initial capacities of rows, a segment and intersections, estimated from sizes alone.

    Args:
        points: of this rank. pixels: of a view. views: that this rank splats its points for.
        is_exchanged: True if rows are exchanged.
    """
    rows = padded(points * views)
    tiles = -(-pixels // (TILE * TILE))
    return rows, rows if is_exchanged else padded(0), padded(4 * points * views + 16 * tiles * views)
