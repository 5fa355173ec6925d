"""Plans: every view once, evenly, at home where possible; and which points a rank holds."""

from dataclasses import replace

import pytest
import torch

from ns_multigpu.core.assign.assignment import AllViewsHere, RoundRobinViews
from ns_multigpu.core.assign.placement import Sharded
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Patch, Points, View


def _views(count: int) -> list[View]:
    return [View(torch.eye(4), torch.eye(3), 20 + i, 30, index=i) for i in range(count)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("kind", ["none", "spread", "one"])
def test_deal(ranks: int, count: int, kind: str) -> None:
    views = _views(count)
    holders = {"none": None, "spread": [i % ranks for i in range(count)], "one": [0] * count}[kind]
    plan = RoundRobinViews().assign(views, ranks, holders).drawn
    sizes = [len(patches) for patches in plan]
    assert len(plan) == ranks and max(sizes) - min(sizes) <= 1
    assigned = sorted(p.view for patches in plan for p in patches)
    assert assigned == list(range(count))
    for patches in plan:
        for patch in patches:
            assert patch.rendered(views[patch.view]) == (0, 0, views[patch.view].width, 30)
    if kind == "spread":
        assert all(p.view % ranks == rank for rank, patches in enumerate(plan) for p in patches)


def test_single_refuses_company() -> None:
    with pytest.raises(ValueError, match="single"):
        AllViewsHere().assign(_views(1), 2)


def test_halo_stays_inside_the_image() -> None:
    view = _views(1)[0]
    patch = Patch(0, 2, 10, 9, 30, halo=5)
    assert patch.rendered(view) == (0, 5, 14, 30)
    assert patch.inner(view) == (2, 5, 9, 25)
    assert Patch(0, 4, 4, 4, 9, halo=5).rendered(view) == (4, 4, 4, 4)


@pytest.mark.parametrize("bounds", [None, (0, 0, 25, 100)])
def test_a_shard_does_not_keep_the_whole_model(bounds: tuple[int, ...] | None) -> None:
    """Each rank's rows lie in memory of their own, as large as they are."""
    whole = {"means": torch.rand(100, 3, requires_grad=True), "opacities": torch.rand(100, 1)}
    first = 0
    for rank in range(3):
        held = Sharded(bounds).hold(Points(whole), replace(World.single(), rank=rank, size=3))
        for name, value in held.params.items():
            assert torch.equal(value, whole[name][first : first + len(held)])
            assert value.untyped_storage().nbytes() == value.nbytes < whole[name].nbytes
            assert value.is_leaf and value.requires_grad == whole[name].requires_grad
        first += len(held)
    assert first == 100
