"""Costs that grow with the ranks: the figures of docs/internals/scaling.md, and what they follow from.

Rates are measured (benchmarks/results/locality-sim.md). What they give beyond 128 ranks is extrapolated.
"""

from pathlib import Path

from ns_multigpu.core.step.step_settings import padded
from ns_multigpu.planning.memory import checkpoint_bytes
from ns_multigpu.planning.rates import BACKWARD, PEER, RASTER, SORT
from ns_multigpu.planning.work import GRADIENT_BYTES, WIRE_BYTES, Workload, usual_tiles

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "scaling.md"
VIEWS = 260_000
PATCHES = 16
"""Patches of a view."""
COUNT_MS = 0.18
"""Milliseconds of one core for counting a view's patches in a sample of 4 million points."""
REGIONS = {"aerial": (3.64 - 1.03, 0.609 - 0.076), "street-far-plane": (3.89 - 1.05, 0.596 - 0.151)}
"""Regions of METIS within a machine compared with round-robin: how much more of the mean the busiest GPU draws, and the
fraction of all exchanged rows that they save."""


def plan_ms(ranks: int) -> float:
    """Return milliseconds of a plan with 2 views of 16 patches a rank, from 32, 64 and 128 ranks."""
    return 26.8 * (ranks / 32) ** 2.18


def costs(ranks: int) -> dict[str, str]:
    """Return a column of the page's table."""
    machines = ranks // 8
    run = Workload(1_000_000_000, 1920, 1080, views=2 * ranks, gpus=ranks, machines=machines, visible=0.0037)
    forwarding, least = 8 - 1 + machines - 1, padded(0) * (WIRE_BYTES + GRADIENT_BYTES)
    return {
        "ranks": f"{ranks:,}",
        "a plan, ms": f"{plan_ms(ranks):,.0f}",
        "counting for a placement, CPU s": f"{COUNT_MS * VIEWS / 1e3:.0f}",
        "needs of all patches, GB": f"{4 * VIEWS * PATCHES * ranks / 1e9:.2f}",
        "ranks that a rank sends to": f"{forwarding}",
        "the same without forwarding": f"{ranks - 1:,}",
        "least bytes sent in a step, MB": f"{forwarding * least / 1e6:.1f}",
        "the same without forwarding, MB": f"{(ranks - 1) * least / 1e6:.1f}",
        "images of a rank, GB": f"{3 * run.pixels * VIEWS / ranks / 1e9:.1f}",
        "checkpoint of a rank, GB": f"{checkpoint_bytes(run) / ranks / 1e9:.1f}",
    }


def test_the_pages_table() -> None:
    lines = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines if len(cells) == 3}
    found = [costs(ranks) for ranks in (32, 128, 1024)]
    assert rows == {"---": ["---"] * 3} | {name: [column[name] for column in found] for name in found[0]}
    for ranks, measured in ((32, 26.8), (64, 120.2), (128, 550.1)):
        assert abs(plan_ms(ranks) - measured) < 0.02 * measured


def test_round_robin_is_right_within_a_machine() -> None:
    """A row that is drawn costs its share of sorting and rasterization; one that is exchanged crosses and returns."""
    of_tile = SORT.intersections + RASTER.intersections + BACKWARD.intersections
    for busier, saved in REGIONS.values():
        drawing = (RASTER.rows + tiles * of_tile for tiles in (usual_tiles(1920 * 1080), 8.0))
        below, crowded = (saved * (WIRE_BYTES + GRADIENT_BYTES) / (busier * one / 1e6) for one in drawing)
        assert 10e6 < below < 14e6 < PEER.bytes_per_ms and crowded < below
