"""Pixels that ranks write into each other's memory: on pretended GPUs the owners get what one rank composites."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.members import Members
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.composite import CompositeOperators, CompositePixels, LocalCells
from ns_multigpu.core.exchange.peer_pixels import PeerPixels
from ns_multigpu.core.exchange.transport import launched, launched_together
from ns_multigpu.core.kernels import Drawn
from ns_multigpu.core.types import Patch, View

WIDTH, HEIGHT, RANKS = 40, 32, 3
VIEWS = [View(torch.eye(4), torch.eye(3), WIDTH, HEIGHT, index) for index in range(2)]
ORDER = ((0, 2, 1), (1, 0, 2))


def drawing(cell: int) -> Drawn:
    """Return the colours of both views as a rank draws them, and alphas, negative in places."""
    g = torch.Generator().manual_seed(cell)
    alpha = torch.rand(2 * WIDTH * HEIGHT, generator=g) * 0.9 + 0.05
    alpha = torch.where(torch.rand(len(alpha), generator=g) < 0.2, -alpha, alpha)
    return Drawn(torch.rand(len(alpha), 3, generator=g), alpha, torch.zeros(0), None)


def whole(cell: int) -> list[Patch]:
    return [replace(Patch.whole(position, view), cell=cell) for position, view in enumerate(VIEWS)]


def operators(world: World, *, half: bool = False) -> tuple[CompositePixels, CompositeOperators]:
    leg = CompositePixels(LocalCells(world.rank, 1), half=half)
    leg.fast_links = True
    leg.prepare(RANKS * 2 * WIDTH * HEIGHT if world.size > 1 else 0, world)
    return leg, leg.operators(world)


@pytest.mark.parametrize("half", [False, True])
def test_owners_composite_what_ranks_draw(half: bool) -> None:
    cuts = [0, 16, 16, HEIGHT]  # the second rank owns nothing
    bands = [Patch(0, 0, top, WIDTH, end, 2) for top, end in pairwise(cuts)]
    owned = [[replace(band, view=k) for k in range(2) if band.y0 < band.y1] for band in bands]
    plan = replace(Plan.of([whole(cell) for cell in range(RANKS)], owned), order=ORDER)
    together = [patch for cell in range(RANKS) for patch in whole(cell)]
    alone = replace(Plan.of([together], [[patch for some in owned for patch in some]]), order=ORDER)
    everything = [drawing(cell) for cell in range(RANKS)]
    drawn = Drawn(*(torch.cat(of) for of in zip(*((d.color, d.alpha, d.last) for d in everything), strict=True)), None)
    _, one = operators(World.single())
    assert one.split(alone) == [alone]
    expected = launched(one.exchange(drawn, alone, VIEWS))
    g = torch.Generator().manual_seed(9)
    v_color, v_alpha = torch.randn(expected.color.shape, generator=g), torch.randn(len(expected.color), generator=g)
    wanted = launched(one.return_gradients(v_color, v_alpha))

    members = Members([torch.device("cpu")] * RANKS)
    legs, several = zip(*(operators(world, half=half) for world in members.worlds), strict=True)
    close: Any = {"rtol": 2e-3, "atol": 2e-3} if half else {"rtol": 0, "atol": 0}
    assert [op.split(plan) for op in several] == [[plan]] * RANKS, "links are fast"
    for _ in range(2):  # regions are used again
        found = launched_together(
            [op.exchange(d, plan, VIEWS) for op, d in zip(several, everything, strict=True)], members
        )
        torch.testing.assert_close(torch.cat([f.color for f in found]), expected.color, **close)
        torch.testing.assert_close(torch.cat([f.alpha for f in found]), expected.alpha, **close)
        sizes = [len(f.alpha) for f in found]
        given = zip(several, v_color.split(sizes), v_alpha.split(sizes), strict=True)
        back = launched_together([op.return_gradients(c, a) for op, c, a in given], members)
        torch.testing.assert_close(torch.cat([b[0] for b in back]), wanted[0], **close)
        torch.testing.assert_close(torch.cat([b[1] for b in back]), wanted[1], **close)
    written = [leg.written_bytes(plan, VIEWS, world) for leg, world in zip(legs, members.worlds, strict=True)]
    rows, own, number = 2 * WIDTH * (16 + 2), 2 * WIDTH * 16, 2 if half else 4
    # Owners send to each other, and return to both others; the rank between sends to both.
    assert [count / (4 * number) for count in written] == [rows + 2 * own, 2 * rows, rows + 2 * own]


def test_over_slow_links_a_batch_is_exchanged_in_two() -> None:
    views = 3
    patches = [replace(patch, view=k) for k in range(views) for patch in whole(1)[:1]]
    plan = replace(Plan.of([patches, []], [[], patches]), order=((0, 1),) * views)
    leg = CompositePixels(LocalCells(0, 1))
    cases = (2, False, 3, [[0, 1], [2]]), (2, True, 3, []), (1, False, 3, []), (2, False, 1, [])
    for size, fast, order, parts in cases:
        leg.fast_links = fast
        one = replace(plan, order=plan.order[:order])
        found = leg.operators(World(0, size, 0, size, torch.device("cpu"))).split(one)
        assert [[patch.view for patch in some.drawn[0]] for some in found] == (parts or [[0, 1, 2]])
        assert [some.views() for some in found] == (parts or [[0, 1, 2]])
        assert {some.order for some in found} == {one.order}


def test_regions_lie_apart_and_end_in_time() -> None:
    members = Members([torch.device("cpu")] * 2)
    first, second = (PeerPixels(world, 3) for world in members.worlds)
    sizes = [[0, 3], [2, 0]]

    def exchanged(region: int, a: Tensor, b: Tensor) -> list[Tensor]:
        return launched_together([first.exchange(a, sizes, region), second.exchange(b, sizes, region)], members)

    a, b = torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5])
    for_first, for_second = exchanged(0, a, b)
    exchanged(1, 10 * a, 10 * b)
    assert for_first.tolist() == [4, 5] and for_second.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="do not fit"):
        launched_together([first.exchange(torch.ones(4), [[0, 4], [0, 0]], 1)], members)
