"""The simulation of exchanges on a small city: pixels depend on no model, and the choice is never the worse."""

import pytest

from benchmarks.scaling.exchange_sim import MODELS, rows_of
from benchmarks.scaling.pixel_sim import scene_of


@pytest.mark.slow
def test_a_small_city() -> None:
    scene = scene_of("street", 4, 12, 3000, None)
    rows = rows_of(scene, 4, 3)
    assert [row["model"] for row in rows] == list(MODELS)
    pixels = {row["pixels"]["busiest"] for row in rows}
    assert len(pixels) == 1 and pixels.pop() > 1e6, "whatever the model"
    splats = [row["splats"]["busiest"] for row in rows]
    assert splats[1] / splats[0] == pytest.approx(MODELS[1] / MODELS[0], rel=0.3)
    parts = [row["mixed"]["as splats"] for row in rows]
    assert 1 >= parts[0] >= parts[1] >= parts[2] >= 0 and parts[0] > parts[2]
    for row in rows:
        better = min(row[kind]["mean"] for kind in ("pixels", "splats"))
        assert 0 < row["mixed"]["mean"] < 1.05 * better
