"""The benchmark of a training step of each primitive: both variants draw and train."""

from typing import Any

import pytest
import torch

from benchmarks.kernels import primitives_step, surfels
from benchmarks.scenes.cloud import make_scene
from benchmarks.scenes.garden import TINY, Scene
from ns_multigpu.primitives.registry import PRIMITIVES
from tests.lib.recorded import RecordedPool


@pytest.mark.parametrize("kind", PRIMITIVES)
def test_both_variants_train(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives_step, "GraphPool", lambda _: RecordedPool())
    both = primitives_step.Both(kind, 60, (48, 40), torch.device("cpu"))
    work, step = both.captured()
    step.status()
    for way, turns in ((both.ordinary(), 1), (work, 3)):
        for _ in range(turns):
            before = {name: value.detach().clone() for name, value in both.params.items()}
            way()
            assert all(bool((value.detach() != before[name]).any()) for name, value in both.params.items())
    status = step.status()
    assert status.done == 3 and not status.full and float(step.report[-1]) == 0
    assert status.rows > 30 and status.intersections > status.rows


def test_a_whole_step_of_2d_gaussians_counts_for_densification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives_step, "GraphPool", lambda _: RecordedPool())
    kept = []

    def spied(*given: Any) -> Any:
        kept.append((given, primitives_step.captured_step(*given)))
        return kept[0][1]

    monkeypatch.setattr(surfels, "captured_step", spied)
    made = make_scene(200, 48, 40)
    shape = (made.means, made.quats, made.scales.log(), made.opacities.logit(), made.sh_dc, made.sh_rest)
    step = surfels.our_step(Scene(TINY, *shape, made.viewmats, made.Ks, made.target))
    (_, params, _, _, _, statistics), (_, taken) = kept[0]
    before = {name: value.clone() for name, value in params.items()}
    for turn in range(3):
        counted = statistics["count"].clone()
        step()
        assert float((statistics["count"] - counted).max()) == 1, f"step {turn}"
    assert all(bool((value != before[name]).any()) for name, value in params.items())
    assert params["scales"].shape == (200, 2) and float(taken.report[0]) > 0
