"""The capacity line, and the cap that densification gets: the same points on any number of ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gsplat.strategy import DefaultStrategy

import ns_multigpu.plugin.splats.capacity as capacity
from ns_multigpu.core.dist.world import World
from ns_multigpu.planning.work import Workload
from ns_multigpu.plugin.splats.capacity import Capacity, cap_of, describe
from ns_multigpu.primitives.densify.cap import allowed_growth
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from ns_multigpu.primitives.densify.regroup import decide
from tests.lib.ranks import run_ranks
from tests.lib.resuming import start
from tests.lib.training_run import save_nothing

RUN = Workload(1000, 640, 480, views=2, gpus=2)


@pytest.mark.parametrize(
    ("now", "after", "cap", "allowed"),
    [
        (100, 10**9, None, True), (100, 120, 120, True), (100, 121, 120, False), (100, 80, 90, True),
        (200, 150, 120, True), (200, 200, 120, True), (200, 201, 120, False), (0, 0, 0, True),
    ],
)  # fmt: skip
def test_growth_is_allowed_up_to_the_cap(now: int, after: int, cap: int | None, allowed: bool) -> None:
    assert allowed_growth(now, after, cap) == allowed


def _points(count: int) -> tuple[dict[str, torch.nn.Parameter], dict[str, Any]]:
    g = torch.Generator().manual_seed(4)
    shapes = {"means": 3, "scales": 3, "quats": 4, "opacities": 1}
    params = {name: torch.nn.Parameter(torch.randn(count, n, generator=g)) for name, n in shapes.items()}
    steep = torch.rand(count, generator=g)
    return params, {"grad2d": steep, "count": torch.ones(count), "radii": torch.zeros(count), "scene_scale": 1.0}


def test_a_refinement_beyond_the_cap_only_prunes() -> None:
    params, state = _points(400)
    faint = params["opacities"].flatten().sigmoid() < 0.3
    rules = {"prune_opa": 0.3, "grow_grad2d": 0.5, "refine_scale2d_stop_iter": 0}
    grown = decide(DefaultStrategy(**rules), params, state, 200)
    assert grown.total > 400 and 0 < faint.sum() < 400
    reported: list[int] = []
    densifier = ReplicatedDensifier(**rules, cap=grown.total - 1, held_back=reported.append)
    before = params["means"].detach().clone()
    densifier._refine(params, {}, state, 200)
    assert reported == [grown.total]
    assert torch.equal(params["means"].detach(), before[~faint]), "in their order, and as they were"
    params, state = _points(400)
    ReplicatedDensifier(**rules, cap=grown.total, held_back=reported.append)._refine(params, {}, state, 200)
    assert len(params["means"]) == grown.total and len(reported) == 1


def test_line_has_present_possible_and_final_points() -> None:
    found = Capacity(1000, 2_000_000, 64 << 30, RUN, on_gpu=True)
    text, worrying = describe(found, "tile", 2_000_000)
    assert not worrying
    assert text == (
        "Gaussians: 1,000 at the start, cap 2,000,000 (what fits in memory; --pipeline.model.max-gaussians). About 2.0 "
        "million fit in memory (64.00 GiB per GPU, strategy tile)."
    )
    text, _ = describe(Capacity(1000, 999_999, 64 << 30, RUN, on_gpu=True), "tile", 9000, "9 for each of 1,000")
    assert "cap 9,000 (9 for each of 1,000; --pipeline.model.max-gaussians). About 999,999 fit" in text
    text, worrying = describe(found, "tile", 3_000_000)
    assert worrying and "cap 3,000,000 (--pipeline.model.max-gaussians)" in text
    text, worrying = describe(Capacity(3_000_000, 2_000_000, 64 << 30, RUN, True), "batch", 2_000_000)
    assert worrying and "may not fit" in text
    text, worrying = describe(Capacity(1000, None, -1, RUN, False), "pixel", None)
    assert not worrying and "1,000 at the start, no cap" in text and "memory" not in text


def test_gpus_cap_by_what_fits_and_processors_do_not() -> None:
    assert cap_of(Capacity(1, 50, 1, RUN, True), None) == 50
    assert cap_of(Capacity(1, 50, 1, RUN, False), None) is None
    assert cap_of(Capacity(1, 50, 1, RUN, True), 70) == cap_of(Capacity(1, 50, 1, RUN, False), 70) == 70


def test_workers_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_memory", lambda: 1000)
    alone = World.single()
    assert capacity.usable_memory(alone, 30) == 1030
    assert capacity.usable_memory(replace(alone, size=4, local_size=2), 30) == 530, "what a model takes is its own"
    monkeypatch.setattr(capacity, "available_memory", lambda: None)
    assert capacity.usable_memory(alone, 30) is None


class _Console:
    """Keeps what is printed."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def print(self, text: Any, **_: Any) -> None:
        self.said.append(str(text))


def _capped(world: World, capture: Path, run: Path, cap: int) -> tuple[int, list[str], torch.Tensor, int]:
    """Train through a refinement with a cap, and return the points, what was said, the means, and what fits."""
    console, found = _Console(), list[Capacity]()
    usual = capacity.measure

    def spy(*args: Any, **options: Any) -> Capacity:
        found.append(usual(*args, **options))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "CONSOLE", console)
        patch.setattr(capacity, "usable_memory", lambda *_: (8 + world.rank) << 30)
        patch.setattr(capacity, "measure", spy)
        steps = 24 // world.size  # a refinement is due with image 18
        trainer = start(world, capture, run / f"{world.size}-{world.rank}", steps, max_gaussians=cap)
        save_nothing(trainer)
        trainer.train()
    means = trainer.pipeline.model.gauss_params["means"].detach()
    return len(means), console.said, means, found[0].fits or 0


@pytest.mark.parametrize("cap", [70, 10**6])
def test_a_run_keeps_its_cap_on_any_number_of_ranks(tmp_path: Path, capture: Path, cap: int) -> None:
    alone = _capped(World.single(), capture, tmp_path, cap)
    first, second = run_ranks(_capped, 2, capture, tmp_path, cap)
    assert (alone[0] <= 70) == (cap == 70)
    assert first[0] == second[0] and torch.equal(first[2], second[2])
    if cap == 70:
        assert first[0] == alone[0], "as many as one rank has"
    for _, said, _, fits in (alone, first):
        assert f"About {fits / 1e6:,.1f} million fit in memory (8.00 GiB per worker" in said[0]
        assert f"cap {cap:,} (--pipeline.model.max-gaussians)" in said[0]
        reported = [text for text in said if "cap is 70" in text]
        assert len(reported) == (cap == 70) and all("--pipeline.model.max-gaussians" in text for text in reported)
    assert first[3] == second[3], "the rank with the least memory decides"
    assert second[1] == [], "rank 0 speaks"
