"""Buffers that outlive a rebuilt step: the transport of rows, and the images that graphs read."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ns_multigpu.core.assign.image_part import ImagePart
from ns_multigpu.core.dist.peer_memory import TransportChoice
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange import replicated_rows
from ns_multigpu.core.exchange.hierarchical_rows import HierarchicalRows
from ns_multigpu.core.exchange.hierarchy import Hierarchy
from ns_multigpu.core.exchange.pair_capacities import pairs_of
from ns_multigpu.core.exchange.replicated_rows import PeerReplicas
from ns_multigpu.core.exchange.transports import CollectiveRows, PeerRows
from ns_multigpu.core.step.step_settings import Status, StepSettings, with_halos
from ns_multigpu.core.types import Patch, View
from ns_multigpu.plugin.blocks import step_buffers
from ns_multigpu.plugin.blocks.fused_rescue import bytes_of_step
from ns_multigpu.plugin.blocks.step_buffers import StepBuffers
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels
from strategies import STRATEGIES

SETTINGS = StepSettings(32, 48, views=4, ssim_lambda=0.2, rows=64, segment=32, intersections=256)


def make_buffers(
    strategy: str, world: World | None = None, *, transport: str = "collective", half: bool = False, sort: bool = False
) -> StepBuffers:
    """Of a rank that never meets another; the first of two without a `world`."""
    world = world or replace(World.single(), size=2)
    spread = STRATEGIES[strategy](world)
    spread.rows.half, spread.rows.slots = half, sort
    return StepBuffers(SimpleNamespace(config=SimpleNamespace(transport=transport), strategy=spread), world)


class OwnMemory:
    """In the place of `PeerBuffer`, of a rank that never meets another: all buffers are one."""

    made = 0

    def __init__(self, size: int, world: World) -> None:
        self._bytes = torch.zeros(size, dtype=torch.uint8)
        OwnMemory.made += 1

    def view(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._bytes[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def test_replica_memory_is_reused_for_steps_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reused while its capacity suffices and is not far too large. A new one needs a rendezvous."""
    monkeypatch.setattr(replicated_rows, "PeerBuffer", OwnMemory)
    monkeypatch.setattr(step_buffers, "choose_transport", lambda *_, relayed: TransportChoice("peer", "said so"))
    OwnMemory.made = 0
    buffers = make_buffers("batch", transport="auto")

    def at(rows: int, **settings: Any) -> PeerReplicas:
        found = buffers.transport(replace(SETTINGS, rows=rows, **settings), GaussianKernels(degree=0))
        assert isinstance(found, PeerReplicas)
        assert (found.rows, found.lines, len(found._table), len(found._slots)) == (rows,) * 4
        assert found._at.tolist() == [found._table.data_ptr()]
        return found

    first = at(64)
    assert at(128) is first and at(32) is first and OwnMemory.made == 1
    second = at(132)
    assert second is not first and at(9) is second and OwnMemory.made == 2, "so few are not too many"
    assert at(9, view_numbers=3) is not second, "a message of another length"
    large = at(1 << 22)
    assert at((1 << 20) + 1) is not large, "of which three quarters would lie idle"


def test_padded_messages_have_no_spare_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_buffers("batch").spared() == {"rows": False, "pairs": False}
    assert make_buffers("tile").spared() == {"rows": True, "pairs": False}
    monkeypatch.setattr(step_buffers, "choose_transport", lambda *_, relayed: TransportChoice("peer", "said so"))
    assert make_buffers("batch", transport="auto").spared() == {"rows": True, "pairs": False}
    assert make_buffers("tile", transport="auto").spared() == {"rows": True, "pairs": True}
    assert make_buffers("batch", World.single(), transport="auto").spared()["rows"]


def test_buffers_of_local_rows_are_released_with_the_step() -> None:
    """They are released before a refinement, and before memory of the next step is checked."""
    for strategy, stays in (("tile", True), ("batch", False)):
        buffers = make_buffers(strategy)
        first = buffers.transport(SETTINGS, GaussianKernels(degree=0))
        buffers.forget()
        assert (buffers.transport(SETTINGS, GaussianKernels(degree=0)) is first) == stays


@pytest.mark.parametrize("peer", [False, True])
def test_bytes_written_to_peers_are_counted(peer: bool) -> None:
    """Rows there, and their gradients back, 64 bytes each. Collectives count for themselves."""
    buffers = make_buffers("tile")
    if peer:
        rows: Any = PeerRows.__new__(PeerRows)
        rows.kernels, buffers._transport = GaussianKernels(degree=0), rows
    else:
        buffers.transport(SETTINGS, GaussianKernels(degree=0))
    before = buffers._world.traffic.sent
    buffers.count_traffic(Status(done=2, rows=9, segments=(2, 5), intersections=30, full=False, sent=7))
    assert buffers._world.traffic.sent - before == (7 * 2 * 64 if peer else 0)


@pytest.mark.parametrize("name", ["peer", "collective"])
def test_replicas_write_to_each_other_where_gpus_can(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_buffers, "choose_transport", lambda world, wanted, relayed: TransportChoice(name, wanted))
    monkeypatch.setattr(step_buffers, "make_transport", lambda *_, peer, **__: peer)
    buffers = make_buffers("batch", transport="auto")
    assert buffers.uses_peer_replicas is buffers.transport(SETTINGS, GaussianKernels(degree=0)) is (name == "peer")
    assert not buffers.peer, "no rows are exchanged"


def test_bytes_written_to_replicas_are_counted() -> None:
    """The rows that there are, in each step, and a message. Ranks meet in its `return`, where there is no collective to
    be measured."""
    buffers = make_buffers("batch")
    buffers._transport = replicas = PeerReplicas.__new__(PeerReplicas)
    replicas.world, replicas._line_bytes = World(0, 3, 0, 3, torch.device("cpu")), 76
    replicas._messages = torch.zeros(3, 125, dtype=torch.int64)
    before = buffers._world.traffic.sent
    buffers.count_traffic(Status(done=3, rows=9, segments=(2, 5), intersections=30, full=False, sent=0))
    assert buffers._world.traffic.sent - before == 3 * 2 * (1000 + 9 * 76)
    buffers.uses_peer_replicas = True
    assert [part for part in ("project", "send", "return") if buffers.exchanges_in(part)] == ["return"]
    buffers.forget()
    assert buffers._transport is replicas, "ranks have to meet for another"


def test_capacity_is_checked_for_received_rows() -> None:
    """Each rank sends a segment of at least 60 bytes a row; local rows need none."""
    small, large = (bytes_of_step((1024, pairs_of(size, 4), 4096), 3072, 4, is_exchanged=True) for size in (512, 1024))
    assert large - small >= 4 * 512 * 60
    alone = bytes_of_step((1024, pairs_of(512, 1), 4096), 3072, 1, is_exchanged=False)
    assert alone == bytes_of_step((1024, pairs_of(9999, 1), 4096), 3072, 1, is_exchanged=False)


def test_capacity_is_checked_for_the_rank_that_receives_most_rows() -> None:
    uneven = ((1000, 10, 10), (2000, 0, 30), (3000, 40, 0))
    crowded = tuple((2000, 0, 0) for _ in range(3))  # as many in all, at rank 0
    asked = [bytes_of_step((1024, pairs, 4096), 3072, 3, is_exchanged=True) for pairs in (uneven, crowded)]
    assert asked[0] == asked[1] > bytes_of_step((1024, pairs_of(1999, 3), 4096), 3072, 3, is_exchanged=True)


def test_images_are_at_the_addresses_of_graphs() -> None:
    view = View(torch.eye(4), torch.eye(3), SETTINGS.width, SETTINGS.height)
    image = torch.randint(0, 256, (SETTINGS.height, SETTINGS.width, 3), dtype=torch.uint8)
    patches = [Patch(0, 0, 0, 32, 16, 16), Patch(1, 0, 16, 32, 48, 16), Patch.whole(2, view)]
    views = [view] * 3
    buffers = make_buffers("tile")
    for captures in (False, True):
        buffers.captures = captures
        buffers.make_pictures(SETTINGS, torch.uint8)
        found = buffers.targets([ImagePart.whole({"image": image})] * 3, patches, views)
        parts = [ImagePart.whole({"image": image + 1}).under(patch.rendered(view)) for patch in patches]
        again = buffers.targets(parts, patches, views)
        for patch, old, new in zip(patches, found, again, strict=True):
            x0, y0, x1, y1 = patch.rendered(view)
            assert new.is_contiguous() and torch.equal(new, image[y0:y1, x0:x1] + 1)
            assert (old.data_ptr() == new.data_ptr()) == captures
    buffers.make_pictures(SETTINGS, torch.uint8)
    assert buffers.targets(parts, patches, views)[2].data_ptr() == again[2].data_ptr(), "a rebuilt step reuses them"


def test_capacity_suffices_for_the_patches_of_locality() -> None:
    """Several patches of a view on one rank, with halos all around."""
    buffers = make_buffers("locality")
    buffers.captures = True
    views = [View(torch.eye(4), torch.eye(3), SETTINGS.width, SETTINGS.height, k) for k in range(SETTINGS.views)]
    plan = with_halos(buffers._strategy.plan(views), views)
    buffers.make_pictures(SETTINGS, torch.uint8)
    image = torch.randint(0, 256, (SETTINGS.height, SETTINGS.width, 3), dtype=torch.uint8)
    for mine in plan.owned:
        found = buffers.targets([ImagePart.whole({"image": image})] * len(mine), mine, views)
        for patch, target in zip(mine, found, strict=True):
            x0, y0, x1, y1 = patch.rendered(views[patch.view])
            assert torch.equal(target, image[y0:y1, x0:x1])


def test_lists_by_a_sort_want_bands() -> None:
    with pytest.raises(InputError, match="locality cuts views into patches"):
        make_buffers("locality", sort=True)


def test_steps_that_graphs_cannot_capture_are_launched() -> None:
    assert not make_buffers("tile").captures, "on a CPU"
    gpu = replace(World.single(), device=torch.device("cuda", 0))
    for name in STRATEGIES:
        for sort in (False,) if name in ("locality", "pixel") else (False, True):
            # No graph is worth it whose plan does not come again.
            assert make_buffers(name, gpu, sort=sort).captures == (not sort and name != "pixel")


@pytest.mark.parametrize(("peer", "ranks"), [(True, 2), (False, 2), (True, 1)])
def test_half_a_wire_is_for_collectives(peer: bool, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rank nothing is sent, and no option is refused."""
    choice = TransportChoice("peer" if peer else "collective", "said so")
    monkeypatch.setattr(step_buffers, "choose_transport", lambda *_, **__: choice)
    world = replace(World.single(), size=ranks)
    if peer and ranks > 1:
        with pytest.raises(InputError, match=r"^--pipeline\.wire half: .*or add --pipeline\.transport collective"):
            make_buffers("tile", world, transport="auto", half=True)
        return
    made = make_buffers("tile", world, transport="auto", half=True).transport(SETTINGS, GaussianKernels(degree=0))
    assert (made.half if isinstance(made, CollectiveRows) else None) == (True if ranks > 1 else None)


@pytest.mark.parametrize(
    ("strategy", "peer_access", "options", "forwarded"),
    [
        ("tile", True, {}, True), ("tile", False, {}, False), ("locality", False, {}, True),
        ("tile", True, {"sort": True}, False), ("batch", True, {}, False),
    ],
)  # fmt: skip
def test_rows_of_locality_are_forwarded(
    strategy: str, peer_access: bool, options: dict[str, Any], forwarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of `locality`; and others where there is peer memory to do it with: it changes the order of sums."""
    names = {True: "mixed", False: "collective"}
    monkeypatch.setattr(
        step_buffers, "choose_transport", lambda *_, relayed: TransportChoice(names[peer_access and relayed], "said so")
    )
    world = replace(World.single(), size=4, local_size=2)
    buffers = make_buffers(strategy, world, transport="auto", **options)
    assert buffers.hierarchy == (Hierarchy(2, 2) if forwarded else None)
    if forwarded or strategy == "tile":
        numbers = 8 if forwarded else 4
        made = buffers.transport(replace(SETTINGS, segment=16), GaussianKernels(degree=0)) if not peer_access else None
        assert made is None or ((type(made) is HierarchicalRows) == forwarded and len(made.capacities) == numbers)


@pytest.mark.parametrize("half", [True, False])
def test_half_wire_between_machines_works_with_peer_memory(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are forwarded, all counted pairs have a capacity, and bytes between peers are counted by the sender."""
    wanted: list[bool] = []

    def choose(*_: Any, relayed: bool) -> TransportChoice:
        wanted.append(relayed)
        return TransportChoice("mixed", "said so")

    monkeypatch.setattr(step_buffers, "choose_transport", choose)
    monkeypatch.setattr(
        step_buffers, "make_transport", lambda rows, *_, peer: SimpleNamespace(peer=peer, half=rows.half)
    )
    world = replace(World.single(), size=4, local_size=2, rank=1, local_rank=1)
    buffers = make_buffers("locality", world, transport="auto", half=half)
    hierarchy = Hierarchy(2, 2)
    assert wanted == [True] and buffers.hierarchy == hierarchy
    assert not buffers.peer and not buffers.one_for_all, "each pair has its own capacity"
    assert buffers.pairs(7) == pairs_of(7, 4, 8)
    # On rank 2: 2 of its own, and from rank 3; 70 from machine 0, of which its counterpart there is rank 0.
    received = {
        2: {hierarchy.to_rank(0): 2, hierarchy.forwarded(0, 0): 70},
        3: {hierarchy.to_rank(0): 5, hierarchy.forwarded(0, 0): 9},
    }
    table = tuple(tuple(received.get(rank, {}).get(k, 0) for k in range(8)) for rank in range(4))
    with_forwarding = bytes_of_step((1024, table, 4096), 3072, 4, is_exchanged=True, hierarchy=hierarchy)
    direct = tuple(tuple((2, 5, 70, 9)[rank] if to == 2 else 0 for to in range(4)) for rank in range(4))
    assert with_forwarding == bytes_of_step((1024, direct, 4096), 3072, 4, is_exchanged=True)
    made: Any = buffers.transport(SETTINGS, GaussianKernels(degree=0))
    assert made.peer and made.half == half
    assert HierarchicalRows.written_bytes(object.__new__(HierarchicalRows), 1, 9, 7) == 0


@pytest.mark.parametrize("peer", [True, False])
def test_pixels_of_cells_go_through_peer_memory_where_there_is_any(peer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = TransportChoice("peer" if peer else "collective", "said so")
    monkeypatch.setattr(step_buffers, "choose_transport", lambda *_, relayed: choice)
    monkeypatch.setattr(step_buffers, "make_transport", lambda *_, **__: SimpleNamespace(is_reusable=False))
    buffers = make_buffers("pixel", transport="auto")
    pixels, asked = buffers._strategy.pixels, list[int]()
    assert pixels.fast_links == peer
    monkeypatch.setattr(pixels, "prepare", lambda count, _: asked.append(count))
    buffers.transport(SETTINGS, GaussianKernels(degree=0))
    assert asked == [2 * 4 * 32 * 48 if peer else 0], "of two cells"
    assert [part for part in ("pixels", "send", "raster") if buffers.exchanges_in(part)] == ["pixels", "send"] * peer
    of_tile = make_buffers("tile", transport="auto")
    assert not of_tile.exchanges_in("pixels"), "they are not exchanged"
