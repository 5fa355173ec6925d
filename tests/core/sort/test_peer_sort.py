"""The sort over ranks in each other's memory, and rendering's lists out of it: on ranks that are threads with memory of
their own on one device, over gloo, and on several GPUs."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cuda_ext import intersect_keys
from ns_multigpu.core.dist.peer_memory import PeerBuffer
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.sort.peer_sort import SortBuffers, SortedPairs, peer_merge_sort, sorted_band_lists
from tests.core.sort.test_merge_sort import keys_of
from tests.cuda_ext.peer_sorts import (
    SimulatedMemory,
    bands_of,
    expected_lists,
    padded,
    random_bands,
    received,
    share_out,
    simulate,
    view_sizes,
)
from tests.cuda_ext.splats import Splats, make_splats
from tests.lib.ranks import DEVICES, run_ranks

Pairs = tuple[Tensor, Tensor]
CASES = (
    "random",
    "one rank has all",
    "some have none",
    "very uneven",
    "nothing",
    "equal keys",
    "few keys",
    "large keys",
)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def shards(case: str, size: int, most: int) -> list[Pairs]:
    """Return the initial pairs of each rank, up to about `most`; values encode their origin."""
    parts = enumerate(keys_of(case, size, most))
    return [(keys, torch.arange(len(keys), dtype=torch.int32) + rank * 100_000_000) for rank, keys in parts]


def check_sorted(parts: list[tuple[Tensor, Tensor, int]], whole: list[Pairs], case: str) -> None:
    """The parts are what torch makes of everything together, in equal pieces."""
    keys, order = torch.sort(torch.cat([k for k, _ in whole]), stable=True)
    values = torch.cat([v for _, v in whole])[order]
    assert all(len(k) == len(v) == count for k, v, count in parts), case
    assert torch.equal(torch.cat([k for k, _, _ in parts]), keys), case
    assert torch.equal(torch.cat([v for _, v, _ in parts]), values), case
    lengths = [count for _, _, count in parts]
    assert max(lengths) - min(lengths) <= 1, (case, lengths)


def part_of(result: SortedPairs) -> tuple[Tensor, Tensor, int]:
    """Return the part that there is, copied: the next sort overwrites it."""
    count = int(result.count)
    return result.keys[:count].cpu().clone(), result.values[:count].cpu().clone(), count


def sort_here(
    whole: list[Pairs], capacity: int, world: World, buffers: SortBuffers | None
) -> tuple[tuple[Tensor, Tensor, int], SortedPairs]:
    """This rank's part of the sort, in rubbish up to the capacity."""
    keys, values = (padded(x, capacity).to(world.device) for x in whole[world.rank])
    count = torch.tensor([len(whole[world.rank][0])], device=world.device)
    result = peer_merge_sort(keys, values, count, buffers, world)
    return part_of(result), result


def simulated_world(rank: int, size: int, device: str) -> World:
    return World(rank, size, rank, size, torch.device(device))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_equals_torch_sort(device: str, size: int) -> None:
    most = 3000 if device == "cpu" else 400_000
    inputs = {case: shards(case, size, most) for case in CASES}
    # Each case has fewer lines than its capacity, so the last block of a kernel is partly empty, too.
    capacity = most + 13

    def run(rank: int, memory: SimulatedMemory) -> dict[str, tuple[Tensor, Tensor, int]]:
        buffers = SortBuffers(memory, capacity)
        world = simulated_world(rank, size, device)
        # One after the other in the same buffers, of which none is emptied between.
        return {case: sort_here(whole, capacity, world, buffers)[0] for case, whole in inputs.items()}

    outcomes = simulate(size, SortBuffers.size(capacity, size), device, run)
    for case, whole in inputs.items():
        check_sorted([outcome[case] for outcome in outcomes], whole, case)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 8])
def test_millions_on_one_gpu(size: int) -> None:
    most = 3_000_000
    inputs = {case: shards(case, size, most) for case in ("random", "few keys", "very uneven")}

    def run(rank: int, memory: SimulatedMemory) -> dict[str, tuple[Tensor, Tensor, int]]:
        buffers, world = SortBuffers(memory, most), simulated_world(rank, size, "cuda")
        return {case: sort_here(whole, most, world, buffers)[0] for case, whole in inputs.items()}

    outcomes = simulate(size, SortBuffers.size(most, size), "cuda", run)
    for case, whole in inputs.items():
        check_sorted([outcome[case] for outcome in outcomes], whole, case)


def test_items_beyond_the_capacity_are_cut_off(device: str) -> None:
    whole = [(torch.arange(50) * 3 + rank, torch.arange(50, dtype=torch.int32)) for rank in range(3)]

    def run(rank: int, memory: SimulatedMemory) -> tuple[Tensor, Tensor, int]:
        keys, values = (x[:40].to(device) for x in whole[rank])
        count = torch.tensor([50], device=device)
        world = simulated_world(rank, 3, device)
        return part_of(peer_merge_sort(keys, values, count, SortBuffers(memory, 40), world))

    parts = simulate(3, SortBuffers.size(40, 3), device, run)
    check_sorted(parts, [(k[:40], v[:40]) for k, v in whole], "cut off")


def test_buffers_that_do_not_fit_are_named() -> None:
    memory = PeerBuffer(SortBuffers.size(10, 1), World.single())
    with pytest.raises(ValueError, match="75 pairs of 1 ranks need"):
        SortBuffers(memory, 75)
    keys, values = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"keys \[9\] in buffers of \[10\]"):
        peer_merge_sort(keys, values, torch.tensor([9]), SortBuffers(memory, 10), World.single())
    pairs = peer_merge_sort(keys, values, torch.tensor([9]), None, World.single())
    with pytest.raises(ValueError, match="the bands of 2 ranks; the world has 1"):
        sorted_band_lists(pairs, [[], []], torch.zeros((1, 1), dtype=torch.int32), 1, 1, World.single())


def scene(size: int) -> tuple[list[Splats], list[int], list[list[tuple[int, int, int]]]]:
    """Splats in shards, the sizes of their views, and the bands of each rank; depths have many ties."""
    splats = make_splats(700, 130, 75, sizes=(0.3, 9.0), views=3, seed=size)
    splats.depths.copy_((splats.depths * 10).round())
    cuts = [k * 11 % size for k in range(700)] if size < 4 else [k * 11 % 3 for k in range(700)]
    parts = share_out(splats, cuts)
    parts += [share_out(splats, [1] * 700)[0]] * (size - len(parts))  # a rank that owns nothing
    sizes = view_sizes(splats)
    bands = random_bands(sizes, size, 16, seed=size)
    bands[0] = [(0, 0, 5), (2, 1, 3), (2, 2, 4)]
    bands[-1] = bands[-1] if size == 1 else []
    return parts, sizes, bands


def render_lists(
    capacity: int, world: World, buffers: SortBuffers | None, begin_bit: int
) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's lists, and what `intersect_capacity` says that they are."""
    parts, sizes, bands = scene(world.size)
    on = [part.to(world.device) for part in parts]
    own = on[world.rank]
    rows = (own.means2d, own.conics, own.row_opacities, own.radii, own.depths, own.view_ids)
    keys, values, count = intersect_keys(*rows, sizes, 16, world.rank, capacity)
    pairs = peer_merge_sort(keys, values, count, buffers, world, begin_bit, 48)
    where, segment = received(parts, world.rank)
    where = where.to(world.device)
    tiles = [bands_of(sizes, of_rank, 16)[0] for of_rank in bands]
    got = sorted_band_lists(pairs, tiles, where, segment, 30_000, world)
    wanted = expected_lists(on, bands_of(sizes, bands[world.rank], 16)[1], where, segment, 30_000)
    return [x.cpu() for x in got], [x.cpu() for x in wanted]


def check_lists(outcomes: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    assert int(outcomes[0][1][2]) > 500
    for rank, (got, wanted) in enumerate(outcomes):
        for name, a, b in zip(("tile_offsets", "row_ids", "count"), got, wanted, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), (rank, name)


@pytest.mark.parametrize("begin_bit", [0, 32])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_lists_are_those_of_gathered_rows(device: str, size: int, begin_bit: int) -> None:
    capacity = 12_000

    def run(rank: int, memory: SimulatedMemory) -> tuple[list[Tensor], list[Tensor]]:
        world = simulated_world(rank, size, device)
        return render_lists(capacity, world, SortBuffers(memory, capacity), begin_bit)

    check_lists(simulate(size, SortBuffers.size(capacity, size), device, run))


def collectively(world: World, sort_case: str) -> tuple[tuple[Tensor, Tensor, int], tuple[list[Tensor], list[Tensor]]]:
    whole = shards(sort_case, world.size, 200)
    return sort_here(whole, 250, world, None)[0], render_lists(12_000, world, None, 32)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_give_the_same(size: int) -> None:
    case = "some have none" if size == 3 else "few keys"
    outcomes = run_ranks(collectively, size, case)
    check_sorted([o[0] for o in outcomes], shards(case, size, 200), case)
    check_lists([o[1] for o in outcomes])


def on_gpus(world: World, most: int) -> tuple[dict[str, tuple[Tensor, Tensor, int]], list[Tensor], list[Tensor]]:
    memory = PeerBuffer(SortBuffers.size(most, world.size), world)
    buffers = SortBuffers(memory, most)
    parts = {case: sort_here(shards(case, world.size, most), most, world, buffers)[0] for case in CASES}
    lists = render_lists(most, world, buffers, 32)
    collective = render_lists(most, world, None, 32)
    assert all(torch.equal(a, b) for a, b in zip(lists[0], collective[0], strict=True))
    return parts, *lists


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 4])
def test_on_several_gpus(size: int) -> None:
    most = 1_000_000
    outcomes = run_ranks(on_gpus, size, most, device="cuda")
    for case in CASES:
        check_sorted([outcome[0][case] for outcome in outcomes], shards(case, size, most), case)
    check_lists([(got, wanted) for _, got, wanted in outcomes])
