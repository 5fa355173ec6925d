"""The CUDA kernels of the rasterization, run on a CPU (`emulated`): whole lists, and lists that are split.

Expected values are the CPU twin's in float64, as in test_cuda_rasterization.py, which runs the same kernels on a GPU.
"""

import ctypes
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.cuda_ext.emulated import NEVER, Emulated, build, translated
from tests.cuda_ext.splats import Splats, assert_close_but_few, assert_gradient_close, make_splats

SPLIT = 2048
SEGMENT, CHUNK = 1024, 256
pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("emulated"))


def one_tile(count: int, opacities: tuple[float, float], channels: int = 3, size: int = 16) -> Splats:
    """Splats of which nearly all overlap an image of one tile, or of a few."""
    return make_splats(count, size, 16, sizes=(0.5, 4.0), opacities=opacities, channels=channels)


def expected_of(splats: Splats, lists: tuple[Tensor, Tensor], *, mark_stops: bool) -> tuple[list, tuple[Tensor, ...]]:
    tensors = [*(x.double() for x in splats.inputs()), *lists]
    arguments = [*tensors, list(splats.patches), splats.tile_size]
    return arguments, torch.ops.ns_multigpu.rasterize(*arguments, None, mark_stops)


def compare(
    library: ctypes.CDLL, splats: Splats, split_above: int, *, mark_stops: bool = False,
    lists: tuple[Tensor, Tensor] | None = None,
) -> Emulated:  # fmt: skip
    """Pixels, and gradients, with and without absolute ones. `lists` are those of `intersect` unless given."""
    lists = lists or splats.intersect()
    found = Emulated(library, splats, lists, split_above, mark_stops=mark_stops)
    arguments, (out, alpha, last, state) = expected_of(splats, lists, mark_stops=mark_stops)
    same = found.last == last
    assert (~same).float().mean() <= 4e-3
    assert_close_but_few(found.out.double(), out, 1e-5, 1e-5, 4e-3)
    assert_close_but_few(found.alpha.double(), alpha, 1e-5, 1e-5, 4e-3)
    generator = torch.Generator().manual_seed(1)
    v_out = torch.randn(out.shape, generator=generator) * same[:, None]
    v_alpha = torch.randn(alpha.shape, generator=generator) * same
    walk = (alpha.abs(), last, state, out, v_out.double(), v_alpha.double())
    for absgrad in (True, False):
        gradients = found.backward(v_out, v_alpha, absgrad=absgrad)
        gradients_ = torch.ops.ns_multigpu.rasterize_backward(*arguments, *walk, absgrad)
        for actual, expected in zip(gradients, gradients_, strict=False):
            assert bool(actual.isfinite().all())
            assert_gradient_close(actual, expected, 2e-4)
    return found


@pytest.mark.parametrize(("channels", "mark_stops"), [(1, False), (3, True), (4, False)])
def test_whole_lists(library: ctypes.CDLL, channels: int, mark_stops: bool) -> None:
    """Of no splats to several chunks, tiles cut by the picture's edge and by patches."""
    splats = make_splats(700, 39, 21, opacities=(0.02, 1.0), channels=channels)
    splats = splats.with_patches(0, 0, 0, 39, 21, 0, 5, 5, 5, 9, 0, 1, 2, 38, 20)
    compare(library, splats, NEVER, mark_stops=mark_stops)


@pytest.mark.parametrize("split_above", [NEVER, SPLIT])
def test_patches_behind_others_of_the_same_lists(library: ctypes.CDLL, split_above: int) -> None:
    splats = one_tile(3 * SEGMENT, (0.004, 0.006)).with_patches(0, 0, 0, 16, 16, 0, 2, 1, 15, 16, 0, 0, 0, 9, 16)
    offsets, row_ids = splats.intersect()
    assert int(offsets[1]) > 2 * CHUNK + 1 and int(offsets[1]) % CHUNK
    _, (out, _, last, _) = expected_of(splats, (offsets, row_ids), mark_stops=False)
    rest = replace(splats, patches=splats.patches[5:])
    compare(library, rest, split_above, lists=(offsets[1:], row_ids))
    _, (same, _, same_last, _) = expected_of(rest, (offsets[1:], row_ids), mark_stops=False)
    assert torch.equal(same, out[256:]) and torch.equal(same_last, last[256:])


def by_depth(splats: Splats, *opacities: tuple[int, float, float]) -> Splats:
    """With so many splats of opacities between two, nearest first, and so many behind them."""
    order = splats.depths.argsort(stable=True)
    found = torch.cat([torch.linspace(low, high, count) for count, low, high in opacities])
    return replace(splats, row_opacities=torch.empty_like(found).index_copy_(0, order, found))


def test_a_list_that_is_split(library: ctypes.CDLL) -> None:
    """All of it counts, at every pixel."""
    splats = one_tile(5 * SEGMENT, (0.004, 0.006), 4)
    lists = splats.intersect()
    assert int(lists[0][1]) > 3 * SEGMENT
    found, whole = compare(library, splats, SPLIT, mark_stops=True), compare(library, splats, NEVER, mark_stops=True)
    assert bool((found.last > int(lists[0][1]) - SEGMENT).all()) and torch.equal(found.last, whole.last)
    assert not torch.equal(found.out, whole.out), "rounding differs because it was split"
    again = Emulated(library, splats, lists, SPLIT, mark_stops=True)
    assert torch.equal(found.out, again.out) and torch.equal(found.alpha, again.alpha), "whatever came first"


@pytest.mark.parametrize(
    ("opacities", "closing"),
    [
        ([(6 * SEGMENT, 0.03, 0.06)], {2, 3, 4}),  # by and by: no segment alone closes a pixel
        ([(2 * SEGMENT, 0.004, 0.01), (4 * SEGMENT, 0.3, 0.8)], {2}),  # in one segment, behind others
        ([(3 * SEGMENT, 0.2, 0.9)], {0}),  # in the first
    ],
)
def test_pixels_that_close(library: ctypes.CDLL, opacities: list[tuple[int, float, float]], closing: set[int]) -> None:
    """Whichever segment closes them: the transmittance is that from before, and later segments add nothing."""
    splats = by_depth(one_tile(sum(count for count, *_ in opacities), (0.1, 0.1)), *opacities)
    lists = splats.intersect()
    found = compare(library, splats, SPLIT, mark_stops=True)
    whole = Emulated(library, splats, lists, mark_stops=True)
    assert set((whole.last[whole.alpha < 0] // SEGMENT).tolist()) >= closing
    same = found.last == whole.last
    assert same.float().mean() >= 0.99
    assert torch.equal((found.alpha < 0)[same], (whole.alpha < 0)[same])
    assert torch.allclose(found.alpha[same], whole.alpha[same], atol=2e-6)


def test_only_lists_above_the_length_are_split(library: ctypes.CDLL) -> None:
    """Of a tile with exactly as many, and of one with one splat more; a third is short. Different bits show which
    list was split."""
    faint = one_tile(2 * SPLIT, (0.004, 0.006), size=48)
    counts = [SPLIT, SPLIT + 1, 300]
    by_tile = [torch.arange(0, n, dtype=torch.int32) for n in counts]
    spread = replace(faint, means2d=torch.rand(len(faint.means2d), 2, generator=torch.Generator().manual_seed(2)) * 16)
    shifted = [replace(spread, means2d=spread.means2d + torch.tensor([16.0 * k, 0.0])) for k in range(3)]
    joined = replace(
        spread,
        **{
            name: torch.cat([getattr(one, name)[:n] for one, n in zip(shifted, counts, strict=True)])
            for name in ("means2d", "conics", "row_opacities", "features", "radii", "depths", "view_ids")
        },
    )
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lists = starts, torch.cat([ids + start for ids, start in zip(by_tile, starts, strict=False)])
    whole = Emulated(library, joined, lists).out.view(16, 3, 16, 3)
    for _ in range(4):  # were one drawn both ways, the last to end would show
        split = Emulated(library, joined, lists, SPLIT).out.view(16, 3, 16, 3)
        assert [torch.equal(split[:, k], whole[:, k]) for k in range(3)] == [True, False, True]
        assert torch.allclose(split, whole, atol=1e-5)
    # The three hold 2.15 times the limit. Three shares of six blocks exceed the longest list, those of seven do not.
    for blocks, same in ((6, True), (7, False)):
        assert torch.equal(Emulated(library, joined, lists, SPLIT, blocks).out.view(16, 3, 16, 3), whole) == same


def test_state_before_each_chunk(library: ctypes.CDLL) -> None:
    """Of a list that is split: transmittance, and sums from the segment's start or, at its start, from the list's."""
    splats = one_tile(4 * SEGMENT, (0.004, 0.006))
    lists = splats.intersect()
    count = int(lists[0][1])
    found, whole = (Emulated(library, splats, lists, above) for above in (SPLIT, NEVER))
    chunks = count // CHUNK
    kept, plain = (one.state[-4 * CHUNK * chunks :].view(chunks, 4, CHUNK) for one in (found, whole))
    used = (count - 1) // CHUNK
    assert torch.allclose(kept[:used, 0], plain[:used, 0], rtol=1e-5)
    for before in range(1, used + 1):
        base = before % (SEGMENT // CHUNK)
        start = plain[before - base - 1, 1:] if base and before > base else torch.zeros(3, CHUNK)
        assert torch.allclose(kept[before - 1, 1:] + start, plain[before - 1, 1:], atol=1e-5), before


def test_invalid_offsets_write_in_bounds(library: ctypes.CDLL) -> None:
    """Overlapping lists have more segments than the capacity, and than the capacity behind it."""
    splats = one_tile(SPLIT + 1, (0.3, 0.9)).with_patches(0, 0, 0, 16 * 80, 16 * 5)
    rows = torch.arange(SPLIT + 1, dtype=torch.int32)
    offsets = torch.tensor([0, len(rows)] * 200 + [0], dtype=torch.int32)
    Emulated(library, splats, (offsets, rows), SPLIT)  # says so itself


def test_launches_are_translated() -> None:
    assert translated("pack<<<a > 0 ? b(a) : 1, kThreads, 0, stream>>>(in,\n  x);") == (
        "emulation::launch(a > 0 ? b(a) : 1, kThreads, [&] { pack(in,\n  x); });"
    )
    with pytest.raises(AssertionError, match="another way"):
        translated("pack<<<1, 2>>>(in);")
