"""Relocation of points: exact draws, shares that look alike, rows copied on the spot, and a step not taken."""

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext.reference.projection import rotation_matrices
from cuda_ext.reference.relocation import draws, relocated

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


def test_only_relocation_targets_are_changed_and_reset() -> None:
    g = torch.Generator().manual_seed(2)
    logits, scales = 3 * torch.randn(COUNT, generator=g), torch.randn(COUNT, 3, generator=g)
    copies = torch.randint(-3, 80, (COUNT,), generator=g).clamp_(min=0).int()
    moments, chosen = rows(), copies > 0
    before = [x.clone() for x in (logits, scales, *moments)]
    cuda_ext.share_out(logits, scales, copies, min_opacity=0.005, cleared=moments)
    opacities, factors = relocated(before[0].sigmoid(), copies.long() + 1)
    expected = torch.logit(opacities.clamp(min=0.005, max=1 - torch.finfo(torch.float32).eps))
    torch.testing.assert_close(logits[chosen], expected[chosen], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scales[chosen], (before[1] + factors.log()[:, None])[chosen], rtol=1e-5, atol=1e-5)
    for x, was in zip((logits, scales, *moments), before, strict=True):
        assert torch.equal(x[~chosen], was[~chosen])
    assert not any(bool(x[chosen].any()) for x in moments)


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
