"""A slot for each ray in each cell: those that are not empty are the segments, in the same order along each ray."""

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import launched
from ns_multigpu.radiance.contraction import Domain
from ns_multigpu.radiance.segments import cell_of, clip
from ns_multigpu.radiance.slots import all_slots, clip_to_slots, packed
from tests.lib.ranks import run_ranks
from tests.radiance.scene import FAMILY, cut, rays

BOX = Domain.box(torch.tensor([[-1.0, -1, -1], [1, 1, 1]]))


@pytest.mark.parametrize("cells", [1, 2, 7])
def test_slots_are_the_segments(cells: int) -> None:
    origins, directions = rays(200)
    near = torch.full((200,), 0.05, dtype=torch.float64)
    boxes = cut(cells, BOX).boxes()
    segments, slots = (f(origins, directions, near, near * 60, boxes) for f in (clip, clip_to_slots))
    at = cell_of(segments) * 200 + segments.ray  # a segment's slot
    assert len(slots) == len(segments) == int(slots.live.sum()) > 200 * (cells > 2)
    assert torch.equal(slots.live.flatten().nonzero()[:, 0], at) and torch.equal(slots.counts, segments.counts)
    assert torch.equal(slots.near.flatten()[at], segments.near) and torch.equal(slots.far.flatten()[at], segments.far)
    empty = ~slots.live
    assert bool(empty.any())
    assert bool((slots.near[empty] == 0.05).all()) and bool((slots.far[empty] == 0.05 * 60).all())
    longest = segments.order.shape[1]
    padded = torch.cat([at, at.new_full((1,), cells * 200)])
    assert torch.equal(slots.order[:, :longest], padded[segments.order])
    assert bool((slots.order[:, longest:] == cells * 200).all())


def _gather(world: World, cells: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    bounds = [(rank * cells // world.size, (rank + 1) * cells // world.size) for rank in range(world.size)]
    first, last = bounds[world.rank]
    own = torch.arange(first * 15.0, last * 15.0).view(-1, 5, 3).requires_grad_()
    found = launched(all_slots(own, cells, world))
    found.square().sum().backward()
    return found.detach(), own.grad


@pytest.mark.parametrize(("cells", "ranks"), [(2, 1), (5, 3)])
def test_all_ranks_know_all_slots(cells: int, ranks: int) -> None:
    every = torch.arange(cells * 15.0).view(cells, 5, 3)
    gradients: list[torch.Tensor] = []
    for found, gradient in run_ranks(_gather, ranks, cells):
        assert torch.equal(found, every)
        gradients.append(gradient)
    assert torch.equal(torch.cat(gradients), 2 * every), "each of its own cells"


def test_states_must_be_those_of_the_ranks_cells() -> None:
    with pytest.raises(ValueError, match="states of 3 cells; rank 0 has 2"):
        launched(all_slots(torch.zeros(3, 4, FAMILY.width), 2, World.single()))


@pytest.mark.parametrize("capacity", [3, 5, 8])
def test_slots_that_are_not_empty_are_packed(capacity: int) -> None:
    live = torch.tensor([False, True, False, False, True, False, False, True])
    assert packed(live, capacity).tolist() == [1, 4, 7] + [8] * (capacity - 3)
    assert packed(~live, 8).tolist() == [0, 2, 3, 5, 6, 8, 8, 8]
    assert packed(torch.zeros(8, dtype=torch.bool), 2).tolist() == [8, 8]
