"""What a tile step depends on, what it reports, and the bands that it draws."""

from dataclasses import dataclass

from cuda_ext.ops.step_control import HEAD
from ns_multigpu.core.placement import Plan
from ns_multigpu.core.types import SSIM_HALO, Patch
from ns_multigpu.primitives.gaussians import TILE

HALO = TILE
"""What a band is rendered with beyond its own pixels: enough for the loss, and the tiles stay those of the image."""
assert HALO >= 2 * SSIM_HALO


@dataclass(frozen=True)
class TileSettings:
    """What a step depends on besides parameters, cameras and plan; a change of any makes a new `TileStep`.

    Attributes:
        width, height: of every view, pixels.
        views: of the batch.
        degree, antialiased, absgrad, ssim_lambda: as in `StepSettings`.
        rows: capacity of a rank's own rows.
        segment: capacity of the rows that one rank sends to one other.
        intersections: capacity of a rank's bands.
        selective: as in `StepSettings`: a point's owner has the rows of all views.
        opacity_weight, scale_weight: as in `StepSettings`.
        groups: parts of a rank's own rows, of equally many lines. Each leaves while the next is projected, or with 1
            all of them when all are there; the result is the same.

    Raises:
        ValueError: `groups` is below 1.
    """

    width: int
    height: int
    views: int
    degree: int
    antialiased: bool
    absgrad: bool
    ssim_lambda: float
    rows: int
    segment: int
    intersections: int
    selective: bool = False
    groups: int = 1
    opacity_weight: float = 0.0
    scale_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"TileSettings: rows leave in at least 1 group, not in {self.groups}.")

    @property
    def stops(self) -> list[int]:
        """Where groups of lines end, but for the last: at whole warps, unless there are not as many."""
        even = (self.rows * k / self.groups for k in range(1, self.groups))
        return [min(self.rows, round(line / 32) * 32) for line in even]

    @property
    def tile_rows(self) -> int:
        """Rows of tiles of a view."""
        return -(-self.height // TILE)

    @property
    def words(self) -> int:
        """Length of a rank's message."""
        return HEAD + self.views * self.tile_rows


@dataclass(frozen=True)
class TileStatus:
    """How far the steps have got since the last look: as `fused_step.Status`, over all ranks.

    Attributes:
        done: steps that were taken.
        rows, segment, intersections: the most that any rank had in any of them, taken or not.
        full: whether a capacity was exceeded, or a lazy step waits for a flush.
        sent: rows that this rank sent to other ranks.
    """

    done: int
    rows: int
    segment: int
    intersections: int
    full: bool
    sent: int

    @property
    def needed(self) -> tuple[int, ...]:
        """What the capacities would have had to be."""
        return self.rows, self.segment, self.intersections


def bands(plan: Plan, settings: TileSettings) -> list[list[Patch]]:
    """A plan of whole views and bands of whole rows of tiles, with the halo that a `TileStep` wants."""
    height = settings.height

    def with_halo(patch: Patch) -> Patch:
        whole = patch.y0 == 0 and patch.y1 == height
        return Patch(patch.view, patch.x0, patch.y0, patch.x1, patch.y1, 0 if whole else HALO)

    return [[with_halo(patch) for patch in patches] for patches in plan]
