"""The simulation of `pixel` on a small city: its figures are possible ones, and pixels do not depend on the model.

Shapes of visible parts hold these parts.
"""

import numpy as np
import pytest

from benchmarks.scaling.pixel_sim import MODELS, row_of, scene_of
from benchmarks.scaling.pixel_visible import SHAPES
from ns_multigpu.core.types import TILE


def test_a_small_city() -> None:
    scene = scene_of("aerial", 4, 12, 3000, 150.0)
    assert 0 < scene.shown < 1 and len(scene.means) == len(scene.extent) == 3000
    one, two = row_of(scene, 2, 3), row_of(scene, 4, 3)
    for row, gpus in ((one, 2), (two, 4)):
        assert row["gpus"] == gpus and 1 <= row["GPUs a view"] <= gpus and 0 < row["in sight"] <= 1
        for how in ("as drawn", "leveled"):
            assert 1 / gpus <= row[how]["level"] <= 1 and 0 < row[how]["sent"] < 2 * row[how]["naive"]
        assert row["leveled"]["level"] >= row["as drawn"]["level"]
        sizes = [row["tile"][model] for model in MODELS]
        assert sizes[1] / sizes[0] == pytest.approx(MODELS[1] / MODELS[0]), "tile's bytes grow with the model"
    assert two["in sight"] < one["in sight"], "more cells are smaller"


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_hold_the_tiles_once(shape: str) -> None:
    seen = np.zeros((9, 12), dtype=bool)
    seen[0:2, 1:3] = seen[7:9, 9:12] = seen[0, 6] = True
    covered = np.zeros((9 * TILE - 5, 12 * TILE - 3), dtype=int)
    for x0, y0, x1, y1 in SHAPES[shape](seen, (0, 0, 12 * TILE - 3, 9 * TILE - 5)):
        covered[y0:y1, x0:x1] += 1
    tiles = np.kron(seen, np.ones((TILE, TILE)))[: covered.shape[0], : covered.shape[1]]
    assert covered.max() == 1 and (covered >= tiles).all()
    part = {"rectangle": 0.915, "bands": 0.295, "tiles": tiles.mean()}[shape]
    assert covered.mean() == pytest.approx(part, abs=1e-3)
    nothing = SHAPES[shape](np.zeros((9, 12), dtype=bool), (0, 0, 12 * TILE - 3, 9 * TILE - 5))
    assert nothing == []
