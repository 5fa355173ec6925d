"""Costs of `locality` that grow with the ranks: the arithmetic of docs/internals/scaling.md.

Rates are measured; their sources stand next to them. Beyond 128 ranks the results are extrapolated.
"""

from pathlib import Path

import pytest

from ns_multigpu.core.step.step_settings import padded
from ns_multigpu.planning.memory import checkpoint_bytes
from ns_multigpu.planning.rates import BACKWARD, PEER, RASTER, SORT
from ns_multigpu.planning.work import GRADIENT_BYTES, WIRE_BYTES, Workload, usual_tiles

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "scaling.md"
VIEWS, PATCHES = 260_000, 16
"""Training views, and patches of each."""
COUNT_MS = 0.18
"""Milliseconds of one core for counting a view's patches in a sample of 4 million points (locality-sim.md)."""
REGIONS = {"aerial": (3.64 - 1.03, 0.609 - 0.076), "street-far-plane": (3.89 - 1.05, 0.596 - 0.151)}
"""Regions of METIS within a machine compared with round-robin: how much more of the mean the busiest GPU draws, and the
fraction of all exchanged rows that they save (locality-sim.md)."""


def run(ranks: int) -> Workload:
    return Workload(1_000_000_000, 1920, 1080, views=2 * ranks, gpus=ranks, machines=ranks // 8, visible=0.0037)


def plan_ms(ranks: int) -> float:
    """Return the milliseconds of a plan with 2 views of 16 patches a rank: every rank computes all plans."""
    return 26.8 * (ranks / 32) ** 2.18


def table_of(ranks: int) -> dict[str, str]:
    """Return the page's numbers on so many ranks."""
    workload = run(ranks)
    peers = workload.per_machine - 1 + workload.machines - 1
    least = padded(0) * (WIRE_BYTES + GRADIENT_BYTES)  # of a pair of ranks, whatever is seen
    return {
        "a plan, ms": f"{plan_ms(ranks):,.0f}",
        "counting for a placement, CPU s": f"{COUNT_MS * VIEWS / 1e3:.0f}",
        "needs of all patches, GB": f"{4 * VIEWS * PATCHES * ranks / 1e9:.2f}",
        "ranks that a rank sends to": f"{peers}",
        "the same without forwarding": f"{ranks - 1:,}",
        "least bytes sent in a step, MB": f"{peers * least / 1e6:.1f}",
        "the same without forwarding, MB": f"{(ranks - 1) * least / 1e6:.1f}",
        "images of a rank, GB": f"{3 * workload.pixels * VIEWS / ranks / 1e9:.1f}",
        "checkpoint of a rank, GB": f"{checkpoint_bytes(workload) / ranks / 1e9:.1f}",
    }


def test_the_pages_table() -> None:
    rows = dict[str, list[str]]()
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and line.count("|") == 5:
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name] = cells
    assert rows["ranks"] == ["32", "128", "1,024"]
    for column, ranks in enumerate((32, 128, 1024)):
        for name, value in table_of(ranks).items():
            assert rows[name][column] == value, name


def test_a_plan_takes_what_was_measured() -> None:
    """Simulated, aerial: 32, 64 and 128 ranks with two views a rank."""
    for ranks, measured in ((32, 26.8), (64, 120.2), (128, 550.1)):
        assert plan_ms(ranks) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("scene", REGIONS)
def test_round_robin_is_right_within_a_machine(scene: str) -> None:
    """A row that is drawn costs its share of sorting and rasterization; one that is exchanged crosses and returns."""

    def regions_pay_below(tiles: float) -> float:
        """Return the bytes per millisecond of a GPU's links below which regions would be faster."""
        busier, saved = REGIONS[scene]
        of_tile = SORT.intersections + RASTER.intersections + BACKWARD.intersections
        return saved * (WIRE_BYTES + GRADIENT_BYTES) / (busier * (RASTER.rows + tiles * of_tile) / 1e6)

    below = regions_pay_below(usual_tiles(1920 * 1080))
    assert 10e6 < below < 14e6 < PEER.bytes_per_ms and regions_pay_below(8.0) < below
