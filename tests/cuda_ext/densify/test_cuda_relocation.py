"""Relocation of points, row gathering and vector rotation: our CUDA kernels against the reference."""

import pytest
import torch

import cuda_ext
from cuda_ext.reference.relocation import numbered
from tests.cuda_ext.densify.test_relocation import COUNT, START, gaussians, places, relocated, rows
from tests.cuda_ext.graphs import OUR_KERNELS, captured

pytestmark = OUR_KERNELS


@pytest.mark.parametrize("count", [1, 300, 70_001])
def test_draws_are_those_of_the_reference(count: int) -> None:
    sums, empty = places(count)
    for taken in (None, True, False):
        flag = None if taken is None else torch.tensor(taken)
        expected = cuda_ext.draw_sources(sums, empty, start=START, taken=flag)
        got = cuda_ext.draw_sources(sums.cuda(), empty.cuda(), start=START, taken=None if flag is None else flag.cuda())
        assert all(torch.equal(x.cpu(), y) for x, y in zip(got, expected, strict=True))
    got = cuda_ext.draw_sources(0 * sums.cuda(), empty.cuda(), start=START)
    assert bool((got[0] == -1).all()) and not bool(got[1].any())


def test_shares_are_those_of_the_reference() -> None:
    points, moments = gaussians(), rows()
    there, moments_there = ([x.cuda() for x in tensors] for tensors in (points, moments))
    relocated(there, moments_there)
    relocated(points, moments)
    for x, y in zip(there, points, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(moments_there, moments, strict=True))


def test_rows_of_any_kind_are_copied() -> None:
    sums, empty = places()
    sources, _ = cuda_ext.draw_sources(sums, empty, start=START)
    tensors = rows()
    there = [x.cuda() for x in tensors]
    odd = torch.zeros(1 + 4 * COUNT, dtype=torch.uint8, device="cuda")[1:].view(COUNT, 4)  # no number of 4 bytes
    odd.copy_(torch.arange(COUNT)[:, None])
    cuda_ext.copy_rows([*there, odd], sources.cuda())
    cuda_ext.copy_rows(tensors, sources)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(there, tensors, strict=True))
    expected = torch.where(sources >= 0, sources, torch.arange(COUNT)).to(torch.uint8)
    assert torch.equal(odd.cpu(), expected[:, None].expand(-1, 4))


@pytest.mark.parametrize("count", [0, 1, 77, 40_000])
def test_rows_are_taken(count: int) -> None:
    """Of more tensors than one launch takes, some of which do not follow each other in memory."""
    tensors = [*(7 * rows()), torch.arange(6 * COUNT).view(6, COUNT).T.float()]
    index = torch.randint(0, COUNT, (count,), generator=torch.Generator().manual_seed(count))
    taken = cuda_ext.take_rows([x.cuda() for x in tensors], index.cuda())
    assert all(torch.equal(x.cpu(), was[index]) for x, was in zip(taken, tensors, strict=True))
    assert [x.dtype for x in taken] == [x.dtype for x in tensors] and len(taken) == 64


def test_vectors_are_turned_as_by_the_reference() -> None:
    g = torch.Generator().manual_seed(0)
    storage, vectors = torch.randn(4 * COUNT + 1, generator=g), torch.randn(2, COUNT, 3, generator=g)
    quats = storage[1:].view(COUNT, 4)
    got = cuda_ext.turn(storage.cuda()[1:].view(COUNT, 4), vectors.cuda())  # where no float4 may begin
    torch.testing.assert_close(got.cpu(), cuda_ext.turn(quats, vectors), rtol=1e-5, atol=1e-5)
    assert torch.equal(cuda_ext.turn(quats[7:9].cuda(), vectors[:, 7:9].cuda()), got[:, 7:9])
    assert cuda_ext.turn(quats[:0].cuda(), vectors[:, :0].cuda()).shape == (2, 0, 3)


def test_the_device_alone_decides() -> None:
    """All of it can be captured, and is left out where the step before was not taken."""
    sums, empty = (x.cuda() for x in places())
    points = [x.cuda() for x in gaussians()]
    before, taken = [x.clone() for x in points], torch.zeros((), dtype=torch.bool, device="cuda")

    def relocate() -> torch.Tensor:
        sources, copies = cuda_ext.draw_sources(sums, empty, start=START, taken=taken)
        cuda_ext.copy_rows(points, sources)
        cuda_ext.share_out(*points, copies, min_opacity=0.005, sources=sources, numbers=numbered(sources))
        return sources

    graph, sources = captured(relocate)
    graph.replay()
    assert all(torch.equal(x, was) for x, was in zip(points, before, strict=True)) and bool((sources == -1).all())
    taken.fill_(True)
    graph.replay()
    logits, its = points[3], sources[empty].long()
    assert torch.equal(logits[empty], logits[its]) and not torch.equal(logits, before[3])
    assert bool((points[0][empty] != points[0][its]).any(1).all())
