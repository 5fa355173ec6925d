"""Relocation of points: exact draws, shares that look alike, rows copied on the spot, and a step not taken."""

import math

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext.reference.projection import rotation_matrices
from cuda_ext.reference.relocation import MOST_COPIES, draws, numbered
from tests.lib.ranks import DEVICES

COUNT, START = 500, 1234


def places(count: int = COUNT) -> tuple[Tensor, Tensor]:
    """Running sums of weights, and a third of the places, which weigh nothing and are empty."""
    g = torch.Generator().manual_seed(count)
    weights = torch.randint(0, 1 << 24, (count,), generator=g)
    empty = torch.rand(count, generator=g) < 1 / 3
    return weights.masked_fill_(empty, 0).cumsum(0), empty


def rows(count: int = COUNT) -> list[Tensor]:
    """Tensors of rows of many widths and kinds."""
    g = torch.Generator().manual_seed(count)
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((3,), torch.float32), ((1,), torch.float32), ((15, 3), torch.float32), ((), torch.float32),
        ((3,), torch.bfloat16), ((1,), torch.bfloat16), ((5,), torch.uint8), ((0, 3), torch.float32),
        ((2,), torch.float64),
    ]  # fmt: skip
    return [(200 * torch.rand(count, *shape, generator=g)).to(kind) for shape, kind in shapes]


def test_draws_follow_weights_and_share_a_prefix() -> None:
    sums, empty = places(20_000)
    sources, copies = cuda_ext.draw_sources(sums, empty, start=START)
    assert sources.dtype == copies.dtype == torch.int32
    assert bool((sources[~empty] == -1).all()) and not bool(empty[sources[empty].long()].any())
    assert torch.equal(copies, torch.bincount(sources[empty].long(), minlength=20_000).int())
    weights = torch.diff(sums, prepend=sums.new_zeros(1)).double()
    expected = int(empty.sum()) * weights.view(20, -1).sum(1) / weights.sum()
    assert bool(((copies.view(20, -1).sum(1) - expected).abs() < 5 * expected.sqrt()).all())
    some = draws(7, int(sums[-1]), START, sums.device)
    assert torch.equal(some, draws(900, int(sums[-1]), START, sums.device)[:7]) and int(some.max()) < int(sums[-1])
    assert torch.equal(sources[empty][:7].long(), torch.searchsorted(sums, some, right=True))
    again, _ = cuda_ext.draw_sources(sums, empty, start=START + 1)
    assert not torch.equal(again, sources)


@pytest.mark.parametrize("why", ["not taken", "no weights", "nothing is empty", "no points"])
def test_nothing_is_drawn(why: str) -> None:
    sums, empty = places()
    if why == "no weights":
        sums.zero_()
    elif why == "nothing is empty":
        empty.zero_()
    elif why == "no points":
        sums, empty = sums[:0], empty[:0]
    sources, copies = cuda_ext.draw_sources(sums, empty, start=START, taken=torch.tensor(why != "not taken"))
    assert bool((sources == -1).all()) and not bool(copies.any()) and len(sources) == len(copies) == len(sums)


def gaussians(count: int = COUNT) -> list[Tensor]:
    """Means, quaternions, log scales and logits."""
    g = torch.Generator().manual_seed(2)
    return [torch.randn(count, *shape, generator=g) for shape in ((3,), (4,), (3,), ())]


def relocated(points: list[Tensor], moments: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Fill the empty places by copies; return the sources and the numbers of copies, [N] int32."""
    sums, empty = (x.to(points[0].device) for x in places())
    sources, copies = cuda_ext.draw_sources(sums, empty, start=START)
    cuda_ext.copy_rows(points, sources)
    more = {"sources": sources, "numbers": numbered(sources), "cleared": moments}
    cuda_ext.share_out(*points, copies, min_opacity=0.005, **more)
    return sources, copies


def test_parts_together_look_as_the_one_did() -> None:
    """The same centre, as opaque, and as wide along the longest axis; all else stays."""
    points, before, moments = gaussians(), gaussians(), rows()
    whole = [x.clone() for x in moments]
    sources, copies = relocated(points, moments)
    for source in torch.where(copies > 0)[0].tolist():
        parts = torch.cat([torch.tensor([source]), torch.where(sources == source)[0]])
        mean, frame = before[0][source], rotation_matrices(before[1][source : source + 1])[0]
        apart = (points[0][parts] - mean) @ frame  # in units of the world, along the axes of the Gaussian
        old, new = before[2][source].exp(), points[2][parts].exp()
        torch.testing.assert_close(apart.mean(0), torch.zeros(3), rtol=0, atol=1e-5)
        long, opacity = int(old.argmax()), float(before[3][source].sigmoid())
        others = torch.arange(3) != long
        assert (
            torch.equal(new[:, others], old[others].expand(len(parts), 2))
            and float(apart[:, others].abs().max()) < 1e-5
        )
        x = torch.linspace(-9, 9, 4001)[:, None] * old[long]
        clear = (1 - points[3][parts].sigmoid() * (-0.5 * ((x - apart[:, long]) / new[:, long]).square()).exp()).prod(1)
        assert float(1 - clear[2000]) == pytest.approx(opacity, rel=0.03)
        width = float(torch.trapezoid(1 - clear, x[:, 0]) / (opacity * math.sqrt(2 * math.pi) * old[long]))
        assert width == pytest.approx(1.0, rel=0.01 if len(parts) == 2 else 0.25)
        spread = float(((1 - clear) * x[:, 0].square()).sum() / (1 - clear).sum() / old[long].square())
        assert 0.6 < spread < 1.2
    alone = (copies == 0) & (sources < 0)
    assert int((copies > 1).sum()) > 10 and all(
        torch.equal(x[alone], was[alone]) for x, was in zip(points, before, strict=True)
    )
    for x, was in zip(moments, whole, strict=True):
        assert torch.equal(x[copies == 0], was[copies == 0]) and not bool(x[copies > 0].any())


@pytest.mark.parametrize("device", DEVICES)
def test_copies_may_be_in_other_tensors(device: str) -> None:
    """As where points are added, or sent to another rank: to the bit the same sources and copies."""
    points, later = ([x.to(device) for x in gaussians()] for _ in range(2))
    sources, copies = relocated(points, [])
    its = sources[sources >= 0].long()
    apart, own = [x[its] for x in later], torch.arange(len(its), dtype=torch.int32, device=device)
    cuda_ext.share_out(*apart, copies[its], min_opacity=0.005, sources=own, numbers=numbered(its))
    cuda_ext.share_out(*later, copies, min_opacity=0.005)
    for x, copied, there in zip(later, apart, points, strict=True):
        assert torch.equal(copied, there[sources >= 0]) and torch.equal(x[copies > 0], there[copies > 0])


@pytest.mark.parametrize("opacity", [0.005, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("of", [1, 2, 7, MOST_COPIES, 10**6])
def test_no_part_is_more_opaque_or_invisible(opacity: float, of: int) -> None:
    logit = torch.logit(torch.tensor([opacity]))
    points = [torch.zeros(1, 3), torch.ones(1, 4), torch.zeros(1, 3), logit.clone()]
    cuda_ext.share_out(*points, torch.tensor([of - 1], dtype=torch.int32), min_opacity=0.004)
    assert all(bool(x.isfinite().all()) for x in points) or (of == 1 and opacity == 1.0)
    assert 0.00399 < float(points[3].sigmoid()) <= float(logit.sigmoid())
    assert of > 1 or torch.equal(points[3], logit)


def test_numbers_among_equals() -> None:
    assert numbered(torch.tensor([5, 2, 5, 5, 2, 9])).tolist() == [1, 1, 2, 3, 2, 1]
    assert len(numbered(torch.zeros(0, dtype=torch.int64))) == 0


def test_rows_are_copied() -> None:
    sums, empty = places()
    sources, _ = cuda_ext.draw_sources(sums, empty, start=START)
    tensors = rows()
    before = [x.clone() for x in tensors]
    cuda_ext.copy_rows(tensors, sources)
    for x, was in zip(tensors, before, strict=True):
        assert torch.equal(x[empty], was[sources[empty].long()]) and torch.equal(x[~empty], was[~empty])


def test_rows_are_taken() -> None:
    tensors, index = rows(), torch.randint(0, COUNT, (77,))
    taken = cuda_ext.take_rows(tensors, index)
    assert [x.dtype for x in taken] == [x.dtype for x in tensors]
    assert all(torch.equal(x, was[index]) for x, was in zip(taken, tensors, strict=True))
    assert not cuda_ext.take_rows([torch.nn.Parameter(tensors[0])], index)[0].requires_grad
    with pytest.raises(TypeError, match=r"index is torch\.int32"):
        cuda_ext.take_rows(tensors, index.int())


def test_vectors_are_turned() -> None:
    g = torch.Generator().manual_seed(0)
    quats, vectors = 3 * torch.randn(COUNT, 4, generator=g), torch.randn(2, COUNT, 3, generator=g)
    turned = cuda_ext.turn(quats, vectors)
    expected = torch.einsum("mij,bmj->bmi", rotation_matrices(quats), vectors)
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(cuda_ext.turn(quats[7:9], vectors[:, 7:9]), turned[:, 7:9])
    with pytest.raises(ValueError, match="vectors must have the shape"):
        cuda_ext.turn(quats, vectors[0])
