"""The simulation of `pixel` on a small city: its figures are possible ones, and pixels do not depend on the model."""

import pytest

from benchmarks.scaling.pixel_sim import MODELS, row_of, scene_of


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
