"""The exchange of rows on one GPU, with ranks that share it: the CPU's results, bit for bit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import pack, unpack
from cuda_ext.ops.exchange.row_wire import LOCAL, collect_wire, gaussian_gradients
from tests.cuda_ext.exchange.test_row_exchange import (
    Rows,
    addresses,
    bands,
    check_received,
    exchange,
    make_rows,
    numbers,
)
from tests.cuda_ext.graphs import check_replays
from tests.cuda_ext.routing import route

pytestmark = pytest.mark.gpu


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.is_cuda and found.dtype == expected.dtype and found.shape == expected.shape
    if found.dtype == torch.float32:
        found, expected = found.view(torch.int32), expected.view(torch.int32)
    assert torch.equal(found.cpu(), expected)


def patches_of(ranks: int, views: int) -> list[int]:
    return numbers(bands(ranks, views), views)


SIZES = [  # rows, padding, views, ranks
    (1, 0, 1, 1),
    (31, 1, 1, 3),
    (32, 0, 2, 2),
    (1023, 0, 2, 4),
    (1024, 1, 3, 8),
    (1025, 700, 1, 5),
    (5000, 5000, 40, 7),
    (100_000, 31_337, 4, 8),
    (1_500_000, 123_457, 3, 4),
    (300_000, 0, 2, 32),
    (0, 500, 2, 2),
]


@pytest.mark.parametrize(("real", "padding", "views", "ranks"), SIZES)
def test_every_operator_is_the_twins(real: int, padding: int, views: int, ranks: int) -> None:
    rows, patches = make_rows(real, padding, views), patches_of(ranks, views)
    capacity = max(1, real // 3)
    place, counts = rows.route(patches, ranks)
    on_gpu = rows.to("cuda")
    found = on_gpu.route(patches, ranks)
    assert_same_bits(found[0], place)
    assert_same_bits(found[1], counts)
    assert real < 1000 or int(counts.max()) > capacity // 20

    segments = [[torch.full((1, capacity + 1, 16), 7.0, device=d) for _ in range(ranks)] for d in ("cpu", "cuda")]
    pack(rows, place, addresses(segments[0], 0), capacity)
    pack(on_gpu, place.cuda(), addresses(segments[1], 0), capacity)
    for one, other in zip(*segments, strict=True):
        assert_same_bits(other, one)

    records = torch.cat(segments[0])[:, :capacity].contiguous()
    expected = unpack(records, counts, views)
    for name, column in unpack(records.cuda(), counts.cuda(), views)._asdict().items():
        assert_same_bits(column, getattr(expected, name))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_rows_are_received_unchanged(ranks: int) -> None:
    rows = [make_rows(3000 + 100 * rank, 50, seed=rank).to("cuda") for rank in range(ranks)]
    done = exchange(rows, patches_of(ranks, 2), 1500)
    assert int(done.counts.sum()) > 1000
    check_received(done, 2)


def test_anywhere_on_the_image_and_off_it() -> None:
    """Means and radii of any size, also none that is a number."""
    g = torch.Generator().manual_seed(2)
    rows = make_rows(200_000, 0, 2)
    means2d = torch.randn(200_000, 2, generator=g) * 10.0 ** torch.randint(-3, 9, (200_000, 1), generator=g)
    means2d[::1000], means2d[1::1000, 0], means2d[2::1000, 1] = float("nan"), float("inf"), float("-inf")
    radii = (torch.rand(200_000, 2, generator=g) * 2.0 ** torch.randint(0, 31, (200_000, 1), generator=g)).int()
    rows = replace(rows, means2d=means2d, radii=radii)
    expected = rows.route(patches_of(4, 2), 4)
    for found, wanted in zip(rows.to("cuda").route(patches_of(4, 2), 4), expected, strict=True):
        assert_same_bits(found, wanted)
    assert int(expected[1].min()) > 1000


def test_more_patches_than_a_launch_uploads() -> None:
    rows = make_rows(20_000, 0, 3)
    corners = [(k % 6, k % 3, k * 37 % 45, k * 53 % 65) for k in range(300)]
    patches = [n for rank, view, x, y in corners for n in (rank, view, x, y, x + 4, y + 5)]
    for found, wanted in zip(rows.to("cuda").route(patches, 6), rows.route(patches, 6), strict=True):
        assert_same_bits(found, wanted)
    for none in ([], [0, 0, 5, 5, 5, 9]):
        place, counts = rows.to("cuda").route(none, 2)
        assert bool((place == -1).all()) and counts.tolist() == [0, 0]


def test_records_may_be_a_part_of_a_larger_buffer() -> None:
    memory = torch.randn(3 * 40 * 16 + 7, generator=torch.Generator().manual_seed(3))
    for start in (0, 4, 7):  # the last at no multiple of 16 bytes
        records = memory[start : start + 3 * 40 * 16].view(3, 40, 16)
        counts = torch.tensor([0, 17, 50])
        expected = unpack(records, counts, 2)
        for name, column in (
            unpack(memory.cuda()[start : start + 1920].view(3, 40, 16), counts.cuda(), 2)._asdict().items()
        ):
            assert_same_bits(column, getattr(expected, name))


def test_a_cuda_graph_holds_it() -> None:
    rows = [make_rows(4000, 100, seed=rank).to("cuda") for rank in range(2)]
    patches = patches_of(2, 2)
    memory = [torch.zeros(2, 3000, 16, device="cuda") for _ in range(2)]
    where = [addresses(memory, source) for source in range(2)]

    def step() -> list[Tensor]:
        places = []
        for source, one in enumerate(rows):
            place, counts = one.route(patches, 2)
            pack(one, place, where[source], 3000)
            places.append((place, counts))
        return [*unpack(memory[1], torch.stack([counts[1] for _, counts in places]), 2)]

    found = check_replays(step, lambda by: [one.means2d.add_(by) for one in rows], (0.0, 9.0, 1000.0))
    assert not bool(found[6].any())  # all moved out


def test_places_beyond_int32() -> None:
    """32 ranks of 80 million lines: 2.6 billion places, 10 GB."""
    lines = 80_000_000
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free GPU memory")
    view_ids = torch.zeros(lines, dtype=torch.int32, device="cuda")
    means2d = torch.full((lines, 2), 8.0, device="cuda")
    radii = torch.zeros((lines, 2), dtype=torch.int32, device="cuda")
    alive = torch.tensor([0, 5, lines // 2, lines - 2, lines - 1], device="cuda")
    radii[alive] = 2
    count = torch.tensor([lines - 1], device="cuda")
    place, counts = route(view_ids, count, means2d, radii, [31, 0, 0, 0, 16, 16, 0, 0, 0, 0, 4, 4], 32)
    assert counts.tolist() == [0] * 31 + [4]
    assert place[31, alive].tolist() == [0, 1, 2, 3, -1] and int((place[31] >= 0).sum()) == 4
    grads = torch.arange(64.0, device="cuda").view(4, 16)
    wire, returned = torch.empty(0, dtype=torch.int32, device="cuda"), gaussian_gradients(absgrad=True, depth=True)
    where = (wire, [LOCAL] * 32, [0] * 31 + [4], grads, 31)
    records = collect_wire(place, count, *where, half=False, returned=returned)
    assert torch.equal(records[alive[:4], :12], grads[:, :12]) and int(records.any(1).sum()) == 4


def test_wrong_arguments_are_named() -> None:
    rows = make_rows(10, 2).to("cuda")
    place, _ = rows.route([0, 0, 0, 0, 50, 70], 1)
    with pytest.raises(TypeError, match="radii"):
        replace(rows, radii=rows.radii.cpu()).route([], 1)
    with pytest.raises(TypeError, match="destinations"):
        pack(rows, place, torch.zeros(1, dtype=torch.int64), 5)
    with pytest.raises(ValueError, match="patch"):
        rows.route([5, 0, 0, 0, 5, 5], 1)
    with cuda_ext.use_reference(), pytest.raises(RuntimeError, match="addresses"):
        pack(rows, place, torch.zeros(1, dtype=torch.int64, device="cuda"), 5)


def test_the_reference_routes_and_unpacks_on_the_gpu_too() -> None:
    rows: Rows = make_rows(500, 20).to("cuda")
    native = rows.route(patches_of(3, 2), 3)
    records = torch.randn(3, 50, 16, device="cuda")
    columns = unpack(records, native[1], 2)
    with cuda_ext.use_reference():
        assert all(torch.equal(a, b) for a, b in zip(rows.route(patches_of(3, 2), 3), native, strict=True))
        for a, b in zip(unpack(records, native[1], 2), columns, strict=True):
            assert_same_bits(a, b.cpu())
