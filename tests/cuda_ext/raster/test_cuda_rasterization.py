"""`rasterize` on CUDA: forward and backward, any tile size and number of channels, and what must change nothing.

The lists come from the CPU's `intersect`, so a failure here is one of the compositing. Expected values are the CPU
twin's in float64, itself checked against the plain rule in test_rasterization.py. Pixels where rounding decides a
threshold the other way (they are counted, and few) get no gradient in either.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.raster.rasterization import raster_state_size
from tests.cuda_ext.graphs import OUR_KERNELS, captured
from tests.cuda_ext.splats import Splats, assert_close_but_few, assert_gradient_close, make_splats, pixel_ids

pytestmark = [*OUR_KERNELS, pytest.mark.usefixtures("native")]
Lists = tuple[Tensor, Tensor]

PATCHES = (0, 0, 0, 19, 33, 0, 19, 0, 20, 33, 0, 20, 0, 47, 7, 0, 20, 7, 47, 33)  # as in test_rasterization.py


def _forward(splats: Splats, lists: Lists, device: str, dtype: torch.dtype) -> tuple[list, tuple[Tensor, ...]]:
    """Return the arguments and results of the operator (out, alpha, last, state)."""
    tensors = [x.to(device, dtype) for x in splats.inputs()] + [x.to(device) for x in lists]
    arguments = [*tensors, list(splats.patches), splats.tile_size]
    probe = torch.zeros(0, 2, device=device, dtype=dtype)
    assert compiled_serves(probe)  # compiles and loads on the first call
    return arguments, torch.ops.ns_multigpu.rasterize(*arguments, None)


def _weights(splats: Splats, pixels: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    channels = splats.features.shape[1]
    return torch.randn(pixels, channels, generator=generator), torch.randn(pixels, generator=generator)


def _compare(splats: Splats, lists: Lists | None = None, tolerance: float = 2e-5, differing: float = 2e-3) -> None:
    """CUDA against float64 on CPU: pixels, and gradients with and without absolute sums."""
    lists = splats.intersect() if lists is None else lists
    arguments, (out, alpha, last, state) = _forward(splats, lists, "cuda", torch.float32)
    arguments_, (out_, alpha_, last_, state_) = _forward(splats, lists, "cpu", torch.float64)
    channels = arguments[3].shape[1]
    sums = 0 if splats.tile_size != 16 or channels > 4 else 4 if channels == 4 else 3
    assert state.numel() == raster_state_size(arguments[3], arguments[5], splats.patches, splats.tile_size, 3, sums)
    same = last.cpu() == last_
    assert (~same).float().mean() <= differing
    assert_close_but_few(out.cpu().double(), out_, 1e-5, 1e-5, differing)
    assert_close_but_few(alpha.cpu().double(), alpha_, 1e-5, 1e-5, differing)
    v_out, v_alpha = _weights(splats, len(last))
    v_out, v_alpha = v_out * same[:, None], v_alpha * same
    for absgrad in (True, False):
        gradients = torch.ops.ns_multigpu.rasterize_backward(
            *arguments, alpha, last, state, out, v_out.cuda(), v_alpha.cuda(), absgrad
        )
        gradients_ = torch.ops.ns_multigpu.rasterize_backward(
            *arguments_, alpha_, last_, state_, out_, v_out.double(), v_alpha.double(), absgrad
        )
        assert len(gradients[4]) == (len(splats.means2d) if absgrad else 0)
        for actual, expected in zip(gradients[: 5 if absgrad else 4], gradients_, strict=False):
            assert bool(actual.isfinite().all())
            assert_gradient_close(actual.cpu(), expected, tolerance)
            none = expected == 0  # rows without overlap: exactly zero, on CUDA up to threshold flips
            assert (actual.cpu()[none] != 0).float().sum() <= differing * max(int(none.sum()), 1)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "sizes", [(0.5, 4.0), (0.0, 0.1), (40.0, 200.0), (0.01, 15.0)], ids=["mixed", "sub-pixel", "huge", "needles"]
)
def test_equals_float64(sizes: tuple[float, float], channels: int) -> None:
    _compare(make_splats(400, 147, 93, sizes=sizes, channels=channels, opacities=(0.02, 0.99)), tolerance=1e-4)


@pytest.mark.parametrize("channels", [3, 4])
def test_lists_of_several_chunks(channels: int) -> None:
    faint = make_splats(20_000, 70, 45, sizes=(0.3, 3.0), opacities=(0.004, 0.1), channels=channels)
    assert int(faint.intersect()[0].diff().max()) > 4 * 256
    _compare(faint, tolerance=1e-4)


@pytest.mark.parametrize("channels", [3, 6])
@pytest.mark.parametrize("tile_size", [1, 5, 8, 32, 64])
def test_other_tile_sizes(tile_size: int, channels: int) -> None:
    splats = make_splats(300, 67, 41, channels=channels, views=2, opacities=(0.02, 1.0))
    _compare(replace(splats, tile_size=tile_size), tolerance=1e-4)


def test_several_views_and_patches() -> None:
    splats = make_splats(600, 47, 33, views=3, opacities=(0.02, 1.0))
    _compare(splats.with_patches(2, 0, 0, 47, 33, *PATCHES, 0, 5, 5, 5, 9, 1, 13, 2, 46, 32), tolerance=1e-4)


def test_more_patches_than_one_launch_describes() -> None:
    splats = make_splats(300, 47, 33)
    lines = tuple(n for x in range(47) for y in range(0, 33, 8) for n in (0, x, y, x + 1, min(y + 8, 33)))
    assert len(lines) // 5 > 2 * 96
    _compare(splats.with_patches(*lines), tolerance=1e-4)


def test_patches_give_the_same_bits_as_the_whole() -> None:
    whole = make_splats(300, 47, 33, opacities=(0.02, 1.0))
    ids = pixel_ids(PATCHES).cuda()
    results = []
    for splats in (whole, whole.with_patches(*PATCHES), replace(whole, tile_size=7)):
        results.append(_forward(splats, splats.intersect(), "cuda", torch.float32)[1])
    for k in (0, 1):
        assert torch.equal(results[1][k], results[0][k][ids]) and torch.equal(results[2][k], results[0][k])


def test_means_on_the_edges_of_tiles() -> None:
    splats = make_splats(400, 80, 64, sizes=(0.2, 5.0))
    _compare(replace(splats, means2d=(splats.means2d / 8).round() * 8), tolerance=1e-4)
    _compare(replace(splats, means2d=splats.means2d.floor() + 0.5), tolerance=1e-4)


def test_conics_that_are_not_positive_definite() -> None:
    splats = make_splats(3, 20, 20)
    conics = torch.tensor([[0.01, 0.0, -0.001], [0.0, 0.0, 0.0], [0.01, 0.02, 0.01]])
    radii = torch.full((3, 2), 1000, dtype=torch.int32)
    _compare(
        replace(splats, means2d=torch.full((3, 2), 10.0), conics=conics, radii=radii), tolerance=1e-4, differing=0.01
    )


def test_cap_and_transmittance_cut() -> None:
    splats = make_splats(6, 16, 16, sizes=(100.0, 101.0))
    splats = replace(splats, means2d=torch.full((6, 2), 8.0), depths=torch.arange(6).float())
    capped = replace(splats, row_opacities=torch.full((6,), 0.9999), conics=torch.tensor([[1e-9, 0.0, 1e-9]] * 6))
    arguments, (out, alpha, last, state) = _forward(capped, capped.intersect(), "cuda", torch.float32)
    torch.testing.assert_close(alpha.cpu(), torch.full((256,), 0.999))
    assert bool((last == 0).all())  # the second would leave 1e-6
    ones = [torch.ones_like(out), torch.ones_like(alpha)]
    gradients = torch.ops.ns_multigpu.rasterize_backward(*arguments, alpha, last, state, out, *ones, True)
    assert all(gradients[k].count_nonzero() == 0 for k in (0, 1, 2, 4)) and gradients[3].count_nonzero() == 3
    # T: 0.1, 0.01, 1e-3, then 5e-5: closed before the fourth
    closing = replace(splats, row_opacities=torch.tensor([0.9, 0.9, 0.9, 0.95, 0.2, 0.3]))
    _, (_, alpha, last, _) = _forward(closing, closing.intersect(), "cuda", torch.float32)
    assert bool((last == 2).all()) and bool(((alpha > 0.998) & (alpha < 0.9999)).all())
    _compare(closing, tolerance=1e-3)


def test_one_tile_with_a_hundred_thousand_splats() -> None:
    splats = make_splats(100_000, 16, 16, sizes=(0.3, 3.0), opacities=(0.004, 0.006))
    _compare(splats, tolerance=2e-4, differing=0.02)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("opacities", [(0.004, 0.006), (0.004, 0.1)], ids=["open", "closing"])
def test_lists_that_are_split(monkeypatch: pytest.MonkeyPatch, channels: int, opacities: tuple[float, float]) -> None:
    """Some tiles have longer lists, and some shorter ones; only rounding may differ."""
    splats = make_splats(60_000, 90, 45, sizes=(0.3, 3.0), opacities=opacities, channels=channels)
    splats = replace(splats, means2d=splats.means2d * torch.rand(60_000, 1, generator=torch.Generator().manual_seed(3)))
    lists = splats.intersect()
    lengths = lists[0].diff()
    assert int(lengths.max()) > 8 * 1024 and int(lengths.min()) < 2048
    monkeypatch.setenv("NS_MULTIGPU_SPLIT_ABOVE", "2147483647")
    whole = _forward(splats, lists, "cuda", torch.float32)[1]
    monkeypatch.delenv("NS_MULTIGPU_SPLIT_ABOVE")
    _compare(splats, lists, tolerance=2e-4, differing=0.02)
    split, again = (_forward(splats, lists, "cuda", torch.float32)[1] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(split[:3], again[:3], strict=True))
    assert not torch.equal(split[0], whole[0]) and torch.allclose(split[0], whole[0], atol=2e-4)


@pytest.mark.parametrize("length", ["2047", "many", "4096 splats", "4294967296"])
def test_a_length_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, length: str) -> None:
    monkeypatch.setenv("NS_MULTIGPU_SPLIT_ABOVE", length)
    splats = make_splats(50, 20, 18)
    with pytest.raises(ValueError, match=f"NS_MULTIGPU_SPLIT_ABOVE is '{length}'.*2048 at least"):
        _forward(splats, splats.intersect(), "cuda", torch.float32)


def test_padding_behind_the_lists_changes_nothing() -> None:
    splats = make_splats(2_000, 47, 33, opacities=(0.004, 0.3))
    offsets, rows = splats.intersect()
    padded = torch.cat([rows, torch.full((5_000,), 2**31 - 1, dtype=torch.int32)])
    _compare(splats, (offsets, padded), tolerance=1e-4)
    plain = _forward(splats, (offsets, rows), "cuda", torch.float32)[1]
    with_padding = _forward(splats, (offsets, padded), "cuda", torch.float32)[1]
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], with_padding[:3], strict=True))


def test_list_capacity_without_tiles() -> None:
    """A rank that draws nothing of a step has a capacity of lists, but no tiles. Its state is unwritten."""
    splats = replace(make_splats(500, 47, 33), patches=())
    lists = torch.zeros(1, dtype=torch.int32), torch.full((5_000,), -1, dtype=torch.int32)
    arguments, (out, alpha, last, state) = _forward(splats, lists, "cuda", torch.float32)
    state.view(torch.int32).fill_(2**30)
    memory = torch.full((500, 16), 7.0, device="cuda")
    sinks = torch.tensor([memory.data_ptr()], device="cuda")
    owners, slots = torch.zeros(500, dtype=torch.int32), torch.arange(500, dtype=torch.int32)
    torch.ops.ns_multigpu.rasterize_backward_into(
        *arguments, alpha, last, state, out, out, alpha, True, sinks, owners.cuda(), slots.cuda(), False
    )
    torch.cuda.synchronize()
    assert len(out) == 0 and bool((memory == 7.0).all())


@pytest.mark.parametrize("system_scope", [False, True])
@pytest.mark.parametrize(("channels", "tile_size"), [(3, 16), (4, 16), (4, 8)])
def test_into_two_sinks(system_scope: bool, channels: int, tile_size: int) -> None:
    splats = replace(make_splats(500, 47, 33, channels=channels, opacities=(0.02, 0.9)), tile_size=tile_size)
    arguments, (out, alpha, last, state) = _forward(splats, splats.intersect(), "cuda", torch.float32)
    v_out, v_alpha = (x.cuda() for x in _weights(splats, len(last)))
    walk = (*arguments, alpha, last, state, out, v_out, v_alpha, True)
    expected = torch.ops.ns_multigpu.rasterize_backward(*walk)
    generator = torch.Generator().manual_seed(1)
    owners = torch.randint(-1, 2, (500,), generator=generator).int()  # -1: no rank needs the row's gradient
    slots = torch.randperm(500, generator=generator).int()
    memories = [torch.full((500, 16), float(k + 1), device="cuda") for k in range(2)]
    sinks = torch.tensor([memory.data_ptr() for memory in memories], device="cuda")
    torch.ops.ns_multigpu.rasterize_backward_into(*walk, sinks, owners.cuda(), slots.cuda(), system_scope)
    for k, memory in enumerate(memories):
        mine = (owners == k).cuda()
        found = memory[slots.cuda()[mine].long()] - (k + 1)
        assert_gradient_close(found[:, :2], expected[0][mine], 1e-4)
        assert_gradient_close(found[:, 2:5], expected[1][mine], 1e-4)
        assert_gradient_close(found[:, 5], expected[2][mine], 1e-4)
        assert_gradient_close(found[:, 6 : 6 + channels], expected[3][mine], 1e-4)
        assert_gradient_close(found[:, 10:12], expected[4][mine], 1e-4)
        others = torch.ones(500, dtype=torch.bool, device="cuda")
        others[slots.cuda()[mine].long()] = False
        assert bool((memory[others] == k + 1).all()) and bool((memory[:, 12:] == k + 1).all())


def test_a_graph_holds_forward_and_backward() -> None:
    splats = make_splats(500, 47, 33).to("cuda")
    lists = [x.cuda() for x in make_splats(500, 47, 33).intersect()]
    inputs = [x.clone() for x in splats.inputs()]

    def step() -> list[Tensor]:
        forward = torch.ops.ns_multigpu.rasterize(*inputs, *lists, list(splats.patches), 16, None)
        out, alpha, last, state = forward
        walk = (*inputs, *lists, list(splats.patches), 16, alpha, last, state, out, out, alpha, True)
        return [out, alpha, *torch.ops.ns_multigpu.rasterize_backward(*walk)]

    graph, replayed = captured(step)
    inputs[2].mul_(0.5)
    inputs[3].add_(1.0)
    graph.replay()
    for actual, expected in zip(replayed, step(), strict=True):
        assert_gradient_close(actual, expected, 1e-5)


def test_autograd_gives_the_operators_gradients() -> None:
    splats = make_splats(300, 47, 33, channels=4).to("cuda")
    lists = [x.cuda() for x in make_splats(300, 47, 33, channels=4).intersect()]
    leaves, probe = splats.leaves(), torch.zeros(300, 2, device="cuda", requires_grad=True)
    out, alpha, last = cuda_ext.rasterize(*leaves.inputs(), *lists, patches=splats.patches, absgrad_probe=probe)
    v_out, v_alpha = (x.cuda() for x in _weights(splats, len(last)))
    gradients = torch.autograd.grad([out, alpha], [*leaves.inputs(), probe], [v_out, v_alpha])
    arguments, (out_, alpha_, last_, state_) = _forward(splats, (lists[0], lists[1]), "cuda", torch.float32)
    expected = torch.ops.ns_multigpu.rasterize_backward(*arguments, alpha_, last_, state_, out_, v_out, v_alpha, True)
    assert torch.equal(out, out_) and torch.equal(last, last_)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_gradient_close(actual, wanted, 1e-5)


def test_agrees_with_gsplat() -> None:
    wrapper = pytest.importorskip("gsplat.cuda._wrapper", reason="gsplat is not installed")
    if importlib.import_module("gsplat.cuda._backend")._C is None:
        pytest.skip("gsplat has no kernels here: it found no CUDA toolkit to compile them")
    width, height = 147, 93
    splats = make_splats(3_000, width, height, opacities=(0.02, 0.99))
    arguments, (out, alpha, last, state) = _forward(splats, splats.intersect(), "cuda", torch.float32)
    leaves = [x.detach()[None].requires_grad_() for x in arguments[:4]]
    means2d, conics, opacities, features = leaves
    tiles = arguments[4][:-1].view(1, -(-height // 16), -(-width // 16))
    rendered = wrapper.rasterize_to_pixels(
        means2d, conics, features, opacities, width, height, 16, tiles, arguments[5], absgrad=True
    )
    out_, alpha_ = (x.flatten(0, 2) for x in rendered)
    assert_close_but_few(out, out_, 1e-4, 1e-5)
    assert_close_but_few(alpha, alpha_[:, 0], 1e-4, 1e-5)
    # A pixel that rounding closes one splat earlier or later differs in alpha, and gets no gradient in either.
    same = (alpha - alpha_[:, 0]).abs() < 1e-5
    assert same.float().mean() > 0.99
    v_out, v_alpha = (x.cuda() for x in _weights(splats, len(last)))
    weights = (v_out * same[:, None], v_alpha * same)
    gradients = torch.ops.ns_multigpu.rasterize_backward(*arguments, alpha, last, state, out, *weights, True)
    gradients_ = torch.autograd.grad([out_, alpha_], leaves, [weights[0], weights[1][:, None]])
    for actual, expected in zip(gradients, (*gradients_, means2d.absgrad), strict=True):  # type: ignore[attr-defined]
        assert_gradient_close(actual, expected.view(actual.shape), 2e-3)


def test_wrong_arguments_are_named() -> None:
    splats = make_splats(5, 40, 32)
    arguments, (out, alpha, last, state) = _forward(splats, splats.intersect(), "cuda", torch.float32)
    forward: Callable[..., object] = torch.ops.ns_multigpu.rasterize
    backward: Callable[..., object] = torch.ops.ns_multigpu.rasterize_backward
    walk = (alpha, last, state, out, torch.ones_like(out), torch.ones_like(alpha), False)
    with pytest.raises(TypeError, match="float32"):
        forward(arguments[0].double(), *arguments[1:], None)
    with pytest.raises(ValueError, match="tile_offsets"):
        forward(*arguments[:4], arguments[4][:-1], *arguments[5:], None)
    with pytest.raises(ValueError, match="state"):
        backward(*arguments, *walk[:2], state[:-1], *walk[3:])
