"""N cells on N ranks are N cells on one rank: pixels, loss and gradients."""

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.radiance.exchange import all_segments, balance, bytes_a_ray, cells_of, sum_gradients
from ns_multigpu.radiance.segments import clip
from tests.lib.ranks import run_ranks
from tests.radiance.scene import FAMILY, Outcome, cut, rays, step


@pytest.mark.parametrize(("cells", "ranks"), [(4, 2), (7, 3)])
def test_any_number_of_ranks_is_one(cells: int, ranks: int) -> None:
    one: Outcome = step(World.single(), cells)
    found: list[Outcome] = run_ranks(step, ranks, cells)
    seen = set[str]()
    for outcome in found:
        assert torch.equal(outcome.colour, one.colour) and torch.equal(outcome.depth, one.depth)
        assert torch.equal(outcome.loss, one.loss)
        for name, gradient in outcome.gradients.items():
            torch.testing.assert_close(gradient, one.gradients[name], rtol=1e-12, atol=1e-15)
        seen |= outcome.gradients.keys()
    assert seen == one.gradients.keys() and len(seen) > cells // 2
    assert all(float(g.abs().max()) > 0 for g in one.gradients.values())


@pytest.mark.gpu
def test_any_number_of_gpus_is_one() -> None:
    one: Outcome = step(World.single(), 4)
    for outcome in run_ranks(step, 2, 4, device="cuda"):
        torch.testing.assert_close(outcome.colour, one.colour)
        for name, gradient in outcome.gradients.items():
            torch.testing.assert_close(gradient, one.gradients[name], rtol=1e-9, atol=1e-12)


def test_forward_needs_one_exchange() -> None:
    """Segments' states once, and what is shared once."""
    found: list[Outcome] = run_ranks(step, 2, 2)
    origins, directions = rays()
    near = torch.full((len(origins),), 0.05, dtype=torch.float64)
    begins = clip(origins, directions, near, near * 200, cut(2).boxes()).begins
    longest = max(begins[1], begins[2] - begins[1])
    assert found[0].sent == 8 * (longest * FAMILY.width + 9)


def test_cells_are_distributed_evenly() -> None:
    assert [list(cells_of(rank, 7, 3)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    with pytest.raises(ValueError, match="2 cells for 3 ranks"):
        cells_of(0, 2, 3)


def test_states_must_be_those_of_the_segments() -> None:
    origins, directions = rays()
    near = torch.zeros(len(origins), dtype=torch.float64)
    segments = clip(origins, directions, near, near + 3, cut(2).boxes())
    with pytest.raises(ValueError, match="3 states for"):
        all_segments(torch.zeros(3, FAMILY.width), segments, World.single())


def _shared(world: World) -> list[torch.Tensor]:
    a, b = torch.zeros(2, 3), torch.zeros(4)
    a.grad = torch.full_like(a, world.rank + 1.0)
    if world.rank == 1:
        b.grad = torch.ones_like(b)
    sum_gradients([a, b], world)
    assert a.grad is not None and b.grad is not None
    return [a.grad, b.grad]


def test_a_rank_without_a_gradient_counts_as_zero() -> None:
    for a, b in run_ranks(_shared, 2):
        assert bool((a == 3).all()) and bool((b == 1).all())


def test_figures() -> None:
    origins, directions = rays()
    near = torch.zeros(len(origins), dtype=torch.float64)
    segments = clip(origins, directions, near, near + 3, cut(2).boxes())
    naive, composited = bytes_a_ray(len(origins), len(segments), 48 * len(origins), FAMILY.width)
    assert naive == 48 * 24 and composited == pytest.approx(len(segments) / len(origins) * FAMILY.width * 4)
    assert balance([3, 1]) == 1.5 and balance([0, 0]) == 1.0
