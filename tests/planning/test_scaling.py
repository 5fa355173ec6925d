"""Costs that grow with the ranks: the figures of docs/internals/scaling.md, and what they follow from."""

from pathlib import Path

import pytest

from ns_multigpu.planning.rates import PEER
from ns_multigpu.planning.scaling import REGIONS, regions_pay_below, scale_of
from ns_multigpu.planning.work import Workload, usual_tiles

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "scaling.md"
VIEWS = 260_000


def run(ranks: int) -> Workload:
    return Workload(1_000_000_000, 1920, 1080, views=2 * ranks, gpus=ranks, machines=ranks // 8, visible=0.0037)


def test_the_pages_table() -> None:
    rows = dict[str, list[str]]()
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and line.count("|") == 5:
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name] = cells
    found = [scale_of(run(ranks), VIEWS) for ranks in (32, 128, 1024)]
    assert rows["ranks"] == ["32", "128", "1,024"]
    for name, values in {
        "a plan, ms": [f"{s.plan_ms:,.0f}" for s in found],
        "counting for a placement, CPU s": [f"{s.counting_s:.0f}" for s in found],
        "needs of all patches, GB": [f"{s.needs_bytes / 1e9:.2f}" for s in found],
        "ranks that a rank sends to": [f"{s.peers}" for s in found],
        "the same without forwarding": [f"{s.flat_peers:,}" for s in found],
        "images of a rank, GB": [f"{s.image_bytes / 1e9:.1f}" for s in found],
        "checkpoint of a rank, GB": [f"{s.rank_checkpoint_bytes / 1e9:.1f}" for s in found],
    }.items():
        assert rows[name] == values, name


def test_a_plan_takes_what_was_measured() -> None:
    """Simulated, aerial: 32, 64 and 128 ranks with two views a rank."""
    for ranks, measured in ((32, 26.8), (64, 120.2), (128, 550.1)):
        assert scale_of(run(ranks), VIEWS).plan_ms == pytest.approx(measured, rel=0.02)


def test_round_robin_is_right_within_a_machine() -> None:
    for scene in REGIONS:
        below = regions_pay_below(scene, usual_tiles(1920 * 1080))
        assert 10e6 < below < 14e6 < PEER.bytes_per_ms and regions_pay_below(scene, 8.0) < below
