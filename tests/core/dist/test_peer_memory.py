"""Memory that all ranks can access, and the choice of the transport of rows."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cuda_ext import pack, unpack
from cuda_ext.ops.exchange.row_exchange import add_records
from ns_multigpu.core.dist import peer_memory
from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.peer_memory import PeerBuffer, TransportChoice, choose_transport
from ns_multigpu.core.dist.world import World
from tests.cuda_ext.routing import route
from tests.lib.ranks import run_ranks


def test_peers_are_checked_within_a_machine_if_rows_are_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of one machine are looked at; others are none of their business."""
    asked: list[tuple[str, bool]] = []
    for name in ("_access_problem", "_trial_problem"):
        monkeypatch.setattr(peer_memory, name, lambda _, *, machine, name=name: asked.append((name, machine)))
    world = replace(World.single(), size=4, local_size=2, group=cast(Any, "some"))
    chosen = choose_transport(world, relayed=True)
    assert chosen.name == "mixed" and chosen.peer and "inside each machine" in chosen.reason
    assert asked == [("_access_problem", True), ("_trial_problem", True)]
    for one, relayed in ((world, False), (replace(world, local_size=4), True), (replace(world, local_size=1), True)):
        asked.clear()
        assert choose_transport(one, relayed=relayed).name == "peer", "as the ranks have said"
        assert asked == [("_access_problem", False), ("_trial_problem", False)]
    assert choose_transport(world, "collective", relayed=True).name == "collective"


def test_one_rank_has_its_own_memory() -> None:
    world = World.single("cpu")
    assert choose_transport(world).peer and choose_transport(world, "peer").peer
    assert choose_transport(world, "collective").name == "collective"
    buffer = PeerBuffer(1000, world)
    assert buffer.size == 1000 and buffer.local.dtype == torch.uint8
    assert buffer.addresses == [buffer.local.data_ptr()]
    part = buffer.view(0, 80, (3, 5), torch.float32)
    part.copy_(torch.arange(15.0).view(3, 5))
    buffer.barrier()
    assert torch.equal(buffer.local[80:140].view(torch.float32), torch.arange(15.0))
    assert part.data_ptr() == buffer.addresses[0] + 80
    assert buffer.view(0, 1000, (0, 4), torch.int64).shape == (0, 4)


def test_rows_pass_through_its_own_memory() -> None:
    check_rows_pass(World.single("cpu"))


def test_wrong_arguments_are_named() -> None:
    world = World.single("cpu")
    with pytest.raises(ValueError, match="auto, peer or collective"):
        choose_transport(world, "nvlink")
    with pytest.raises(ValueError, match="at least 1"):
        PeerBuffer(0, world)
    buffer = PeerBuffer(100, world)
    for offset, shape in ((0, (26,)), (-4, (1,)), (2, (1,)), (100, (1,))):
        with pytest.raises(ValueError, match="do not fit"):
            buffer.view(0, offset, shape, torch.float32)


def _choose(world: World) -> tuple[list[TransportChoice], list[str]]:
    chosen = [choose_transport(world), choose_transport(world, "collective")]
    errors: list[str] = []
    for make in (lambda: choose_transport(world, "peer"), lambda: PeerBuffer(64, world)):
        with pytest.raises(RuntimeError) as caught:
            make()
        errors.append(str(caught.value))
    return chosen, errors


def test_no_peer_memory_without_gpus_with_a_reason() -> None:
    results = run_ranks(_choose, 2)
    assert results[0] == results[1], "all ranks decide the same"
    (auto, collective), (forced, made) = results[0]
    assert auto.name == collective.name == "collective" and not auto.peer
    assert "Rank 0" in auto.reason and "takes GPUs" in auto.reason and "asked for" in collective.reason
    assert "`peer` was asked for" in forced and "takes GPUs" in forced and "Choose" in forced
    assert "takes GPUs" in made


def _ask_for_different_sizes(world: World) -> str:
    with pytest.raises(ValueError) as caught:
        PeerBuffer(64 + world.rank, world)
    return str(caught.value)


def test_buffers_of_different_sizes_are_refused_by_all() -> None:
    first, second = run_ranks(_ask_for_different_sizes, 2)
    assert first == second and "[64, 65]" in first


def check_rows_pass(world: World) -> None:
    """Every rank routes its rows to all, and gets the gradients back that those have for them."""
    ranks, lines, capacity, device = world.size, 1000, 600, world.device
    g = torch.Generator().manual_seed(5)  # the same rows on every rank, so that each knows what the others send
    sent = [
        {
            "view_ids": torch.arange(lines).int() // 500,
            "means2d": torch.rand(lines, 2, generator=g) * 64,
            "conics": torch.randn(lines, 3, generator=g),
            "opacities": torch.rand(lines, generator=g),
            "features": torch.rand(lines, 3, generator=g),
            "depths": torch.rand(lines, generator=g),
            "radii": torch.randint(0, 9, (lines, 2), generator=g).int(),
        }
        for _ in range(ranks)
    ]
    patches = [
        n for view in range(2) for r in range(ranks) for n in (r, view, 0, 64 * r // ranks, 64, 64 * (r + 1) // ranks)
    ]
    count = torch.tensor([lines - 100])

    segment = 64 * capacity
    buffer = PeerBuffer(ranks * segment + 64 * lines, world)
    buffer.local.fill_(255)
    tables = buffer.view(world.rank, 0, (ranks, capacity, 16), torch.float32)
    sums = buffer.view(world.rank, ranks * segment, (lines, 16), torch.float32)
    assert tables.data_ptr() == buffer.addresses[world.rank]
    sums.zero_()
    buffer.barrier()  # or a rank's filling would undo another's writing

    mine = {name: column.to(device) for name, column in sent[world.rank].items()}
    place, _ = route(mine["view_ids"], count.to(device), mine["means2d"], mine["radii"], patches, ranks)
    addresses = torch.tensor(buffer.addresses, device=device)
    pack(SimpleNamespace(**mine), place, addresses + world.rank * segment, capacity)
    buffer.barrier()
    routes = [route(one["view_ids"], count, one["means2d"], one["radii"], patches, ranks) for one in sent]
    counts = torch.stack([counts[world.rank] for _, counts in routes])
    assert int(counts.max()) > 100 and (ranks > 1 or int(counts.max()) > capacity)
    received = unpack(tables, counts.to(device), 2)
    for source, (there, _) in enumerate(routes):
        slots = (there[world.rank] >= 0).nonzero().squeeze(-1)[:capacity]
        first = source * capacity
        for name, column in sent[source].items():
            found = getattr(received, name)[first : first + len(slots)].cpu()
            assert torch.equal(found, column[slots]), (name, source)
        assert torch.equal(received.slots[first : first + len(slots)].cpu(), slots.int())
        assert not bool(received.radii[first + len(slots) : first + capacity].any())

    # The gradient of a row is its record and the number of the rank that has it.
    alive = (received.radii > 0).all(-1)[:, None]
    grads = torch.where((tables == tables).flatten(0, 1) & alive, tables.flatten(0, 1), 0.0)
    grads[:, 12:] = torch.where(alive, float(world.rank + 1), 0.0)
    add_records(grads, addresses + ranks * segment, received.owners, received.slots, system_scope=ranks > 1)
    buffer.barrier()
    kept = (place >= 0) & (place < capacity)
    times = kept.sum(0)
    expected = (kept * torch.arange(1, ranks + 1, device=device)[:, None]).sum(0).float()
    assert torch.equal(sums[:, 13], expected) and int(times.max()) == (2 if ranks > 1 else 1)
    total = torch.zeros_like(mine["opacities"])
    for _ in range(int(times.max())):
        total += torch.where(times > 0, mine["opacities"], 0.0)
        times = times - 1
    assert torch.equal(sums[:, 5], total) and int((total > 0).sum()) > 300


def _write_to_each_peer(world: World) -> tuple[TransportChoice, list[int], list[int]]:
    chosen = choose_transport(world)
    assert chosen == choose_transport(world, "peer"), chosen.reason
    assert not choose_transport(world, "collective").peer
    size = 40_000_000
    buffer = PeerBuffer(size, world)
    assert buffer.local.is_cuda and buffer.local.device == world.device and buffer.size == size
    assert all(address % 16 == 0 for address in buffer.addresses) and len(set(buffer.addresses)) == world.size
    part = size // 4 // world.size
    for turn in range(3):  # the barrier may be used again and again
        for rank in range(world.size):
            there = buffer.view(rank, 4 * part * world.rank, (part,), torch.int32)
            there.copy_(torch.arange(part, device=world.device) + 1000 * world.rank + rank + turn)
        buffer.barrier()
        mine = buffer.view(world.rank, 0, (world.size, part), torch.int32)
        for rank in range(world.size):
            expected = torch.arange(part, device=world.device).int() + 1000 * rank + world.rank + turn
            assert torch.equal(mine[rank], expected), (turn, rank)
            theirs = buffer.view(rank, 0, (world.size, part), torch.int32)
            assert torch.equal(theirs[world.rank] - 1000 * world.rank - rank - turn, expected - expected[0])
        buffer.barrier(channel=1)  # before the next turn writes over what others still read
    return chosen, all_gather_objects(world.rank, world), buffer.addresses


def _exchange_rows(world: World) -> None:
    check_rows_pass(world)
    # Another buffer later, of another size, while ranks are not in step.
    buffers = [PeerBuffer(1 << (10 + k), world) for k in range(3)]
    for k, buffer in enumerate(buffers):
        for rank in range(world.size):
            buffer.view(rank, 8 * world.rank, (1,), torch.int64).fill_(100 * k + world.rank)
        buffer.barrier()
        assert buffer.view(world.rank, 0, (world.size,), torch.int64).tolist() == [
            100 * k + rank for rank in range(world.size)
        ]


def _barrier_in_a_graph(world: World) -> None:
    buffer = PeerBuffer(8 * world.size, world)
    number = torch.zeros(1, dtype=torch.int64, device=world.device)
    out = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    mine = buffer.view(world.rank, 0, (world.size,), torch.int64)

    def step() -> None:
        for rank in range(world.size):
            torch.add(number * 10, world.rank, out=buffer.view(rank, 8 * world.rank, (1,), torch.int64))
        buffer.barrier()
        out.copy_(mine)
        buffer.barrier()
        number.add_(1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
        step()
    for turn in range(1, 50):
        graph.replay()
        if turn % 7 == world.rank:
            assert out.tolist() == [10 * turn + rank for rank in range(world.size)]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("check", [_write_to_each_peer, _exchange_rows, _barrier_in_a_graph])
def test_peers(check: object, size: int) -> None:
    results = run_ranks(check, size, device="cuda")  # type: ignore[arg-type]
    if check is _write_to_each_peer:
        assert all(
            chosen == TransportChoice("peer", f"All {size} ranks access each other's memory.")
            for chosen, _, _ in results
        )
        assert all(ranks == list(range(size)) for _, ranks, _ in results)


@pytest.mark.gpu
def test_one_gpu_has_its_own_memory() -> None:
    world = World.single("cuda")
    assert choose_transport(world, "peer").peer
    check_rows_pass(world)


def _two_machines(world: World) -> TransportChoice:
    return choose_transport(replace(world, local_size=1))


@pytest.mark.gpu
def test_two_machines_have_none() -> None:
    for transport in run_ranks(_two_machines, 2, device="cuda"):
        assert transport.name == "collective" and "1 of 2 ranks" in transport.reason
