"""Pictures by the forward half of a step: in bands by all ranks, with exceeded capacities, in parts, without memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.data.scene_box import OrientedBox

import cuda_ext
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.pair_capacities import pairs_of
from ns_multigpu.core.step import forward
from ns_multigpu.core.step.forward import CapacityExceeded, Forward, cut
from ns_multigpu.core.types import View
from ns_multigpu.plugin.render import pictures
from ns_multigpu.plugin.render.palette import rank_colors
from tests.lib.ranks import on_gpus, run_ranks
from tests.lib.rendering import camera, make_pipeline

BOUNDS = {1: (0, 90), 2: (0, 50, 90), 3: (0, 20, 20, 90)}
SIZE = (70, 161)


def _pipeline(world: World, capture: Path, strategy: str) -> Any:
    pipeline = make_pipeline(world, capture, strategy, BOUNDS[world.size], background_color="white")
    pipeline.eval()
    return pipeline


def _render_all(world: World, capture: Path, strategy: str) -> dict[str, Any]:
    pipeline = _pipeline(world, capture, strategy)
    renders, made = pipeline.renders, pipeline.renders.pictures
    found: dict[str, Any] = {"rank": world.rank}
    drawn: list[tuple[int, ...]] = []
    usual = made._gather
    made._gather = lambda plan, *rest: drawn.append(tuple(len(p) for p in plan.owned)) or usual(plan, *rest)
    every = range(world.size)
    found["first"] = renders.render(camera(*SIZE), roots=every)
    found["again"] = renders.render(camera(*SIZE), roots=every)  # cut by what was learned
    found["learned"] = list(made._forward._work)
    made._forward._capacities = forward._Capacities(1024, pairs_of(0, world.size), 1024)
    tries: list[int] = []
    attempt = forward._Try.run
    forward._Try.run = lambda self, capacities: tries.append(capacities.rows) or attempt(self, capacities)  # type: ignore[method-assign]
    made._forward._capacities = forward._Capacities(7, pairs_of(1, world.size), 9)
    found["exceeded capacity"] = renders.render(camera(*SIZE), roots=every)
    found["tries"] = len(tries)
    made._passes = {SIZE: 3}
    found["in parts"] = renders.render(camera(*SIZE), roots=every)
    found["drawn"] = drawn
    pipeline.model.in_one_color = _fail
    found["larger"] = renders.render(camera(90, 40), roots=every)["rgb"].shape  # type: ignore[index]
    forward._Try.run = attempt  # type: ignore[method-assign]
    # What is asked for alone is made alone, where that can be.
    with torch.no_grad():
        found["own"] = pipeline.model.get_outputs_for_camera(camera(*SIZE))
    return found


def _fail(*_: Any) -> None:
    raise AssertionError("not requested")


def test_a_picture_without_compiled_operators(capture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels are asked for: nothing serves them."""
    pipeline = _pipeline(World.single(), capture, "single")
    expected = pipeline.renders.render(camera(40, 30), roots=[0])
    monkeypatch.setattr(Forward, "draw", _fail)
    with cuda_ext.use_reference():
        found = pipeline.renders.render(camera(40, 30), roots=[0])
    torch.testing.assert_close(found["rgb"], expected["rgb"], rtol=1e-4, atol=1e-4)


ALONE = [(1, "single"), (2, "batch"), (2, "tile")]


@pytest.mark.parametrize(
    ("size", "strategy", "device"),
    [*((*one, "cpu") for one in (*ALONE, (3, "batch"), (3, "tile"))), *(on_gpus(*one) for one in ALONE)],
)
def test_a_picture_is_the_models_own(capture: Path, size: int, strategy: str, device: str) -> None:
    with torch.no_grad():
        expected = _pipeline(World.single(device), capture, "single").model.get_outputs_for_camera(camera(*SIZE))
    assert float(expected["rgb"].std()) > 0.05
    for found in run_ranks(_render_all, size, capture, strategy, device=device, seconds=60):
        for name in ("first", "again", "exceeded capacity", "in parts", "own"):
            for output, value in expected.items():
                torch.testing.assert_close(found[name][output].cpu(), value.cpu(), rtol=1e-5, atol=1e-6)
        assert found["tries"] == 2, "drawn again once if a capacity was exceeded"
        assert len(found["learned"]) == 11 and sum(found["learned"]) > 20
        first, again, third, parts, *_ = found["drawn"]
        assert all(count == 1 for count in first) and sum(again) == sum(third) == size
        assert sum(parts) > size or size == 3, "several parts, one after the other"
        assert found["larger"] == (40, 90, 3)


def _owners(world: World, capture: Path) -> Any:
    pipeline = _pipeline(world, capture, "batch")
    with torch.no_grad():
        return pipeline.renders.run_leading(lambda: dict(pipeline.model.get_outputs_for_camera(camera(*SIZE))))


def test_of_replicas_rank_shows_who_draws(capture: Path) -> None:
    outputs, _ = run_ranks(_owners, 2, capture)
    seen, alpha = outputs["rank"], outputs["accumulation"]
    hues = ((seen - (1 - alpha)) / alpha)[alpha[..., 0] > 0.3]
    assert len(hues) > 50
    of_rank = [(hues - torch.tensor(color)).abs().amax(-1) < 0.01 for color in rank_colors(1, 2)]
    assert bool((of_rank[0] | of_rank[1]).all()) and all(int(one.sum()) > 10 for one in of_rank)
    assert float(outputs["rgb"].std()) > 0.05 and not torch.allclose(outputs["rgb"], seen, atol=0.1)


def _without_memory(world: World, capture: Path, strategy: str, where: str) -> tuple[list[str], int, bool]:
    """Rank 1 has too little memory for whole pictures, then for any, then enough again."""
    pipeline = _pipeline(world, capture, strategy)
    renders = pipeline.renders
    expected = renders.render(camera(*SIZE), roots=range(world.size))
    said, usual = list[str](), getattr(forward._Try, where)
    least = SIZE[1] / 3

    def short(self: Any, *args: Any) -> Any:
        if world.rank == 1 and max((p.y1 - p.y0 for p in self._plan.drawn[1]), default=0) > least:
            raise torch.OutOfMemoryError("there is none")
        return usual(self, *args)

    setattr(forward._Try, where, short)
    image = renders.render(camera(*SIZE), roots=range(world.size))
    passes = renders.pictures._passes[SIZE]
    least = -1
    try:
        renders.render(camera(*SIZE))
    except CapacityExceeded as error:
        said.append(str(error))
    setattr(forward._Try, where, usual)
    again = renders.render(camera(*SIZE), roots=range(world.size))
    same = all(torch.allclose(one["rgb"], expected["rgb"], atol=1e-5) for one in (image, again))
    return said, passes, same


@pytest.mark.parametrize(
    ("strategy", "where"), [("batch", "_publish"), ("tile", "_forward"), ("tile", "_publish"), ("pixel", "_publish")]
)
def test_a_rank_without_memory_ends_the_picture_on_all_ranks_and_nothing_else(
    capture: Path, strategy: str, where: str
) -> None:
    for said, passes, same in run_ranks(_without_memory, 2, capture, strategy, where, seconds=60):
        assert len(said) == 1 and "out of memory on rank 1, for a picture of 70x161 pixels" in said[0]
        assert 1 < passes <= pictures.MOST_PASSES and same


def test_bands_follow_the_work() -> None:
    view = View(torch.eye(4), torch.eye(3), 40, 16 * 8 - 3)
    even = cut(view, 2, [])
    assert [(p.y0, p.y1) for p in even] == [(0, 64), (64, 125)]
    below = cut(view, 2, [0, 0, 0, 0, 0, 0, 80, 80])
    assert below[0].y1 > 80 and below[1] == type(below[1])(0, 0, below[0].y1, 40, 125)
    assert cut(view, 2, [0, 0, 0, 80])[0].y1 > 80, "of a view of another height"
    empty = cut(view, 3, [0] * 7 + [8])  # pixels that nothing covers are work, too
    assert [p.y1 for p in empty] == [80, 112, 125]
    many = cut(View(torch.eye(4), torch.eye(3), 5, 20), 4, [3, 3])
    assert sum(p.y1 > p.y0 for p in many) == 2 and {p.y1 for p in many if p.y1 > p.y0} == {16, 20}


def test_derived_leg_does_not_use_the_operators(capture: Path) -> None:
    """A leg that is derived may do something else: the operators do not take its place."""
    strategy = make_pipeline(World.single(), capture, "tile").strategy
    assert Forward.serves(strategy)
    derived = type("Derived", (type(strategy.rows),), {})
    object.__setattr__(strategy, "rows", derived.__new__(derived))
    assert not Forward.serves(strategy)


def test_a_picture_of_a_box_shows_the_placement_all_points(capture: Path) -> None:
    """Cells' boxes are measured by what it is shown: the next picture may be of everything."""
    pipeline = _pipeline(World.single(), capture, "single")
    faintest: list[float] = []
    pipeline.strategy.placement.observe = lambda points, *_: faintest.append(float(points.params["opacities"].min()))
    box = OrientedBox(R=torch.eye(3), T=torch.zeros(3), S=torch.full((3,), 0.5))
    whole, part = (pipeline.renders.render(camera(*SIZE), crop)["rgb"] for crop in (None, box))
    assert not torch.equal(whole, part)
    assert faintest == [float(pipeline.model.opacities.min())] * 2
