"""Parts of space that overlap: what the baselines' fields see, and how they are blended."""

import pytest
import torch

from benchmarks.baselines.overlap import camera_weights, focuses, tiles, weight_in_tile, whole_rays, widened
from ns_multigpu.radiance.contraction import Domain
from ns_multigpu.radiance.partition import partition
from ns_multigpu.radiance.segments import cell_of, clip, round_robin

UNIT = Domain.box(torch.tensor([[0.0, 0, 0], [1, 1, 1]]))


def _positions() -> torch.Tensor:
    """Points that are cut at x = 0.5: they are spread further along x."""
    g = torch.Generator().manual_seed(2)
    points = torch.rand(999, 3, generator=g) * torch.tensor([1.0, 0.4, 0.4]) + torch.tensor([0.0, 0.3, 0.3])
    return torch.cat([points, points * torch.tensor([-1.0, 1, 1]) + torch.tensor([1.0, 0, 0])])


def test_weights_fall_over_the_overlap() -> None:
    cells = partition(_positions(), 2, UNIT)
    assert [split.axis for split in cells.tree.splits] == [0] and cells.tree.splits[0].plane == pytest.approx(0.5)
    wide, extents = tiles(cells, 0.2), cells.extents()
    torch.testing.assert_close(wide[:, 0, 0], torch.tensor([0, 0.45], dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(wide[:, 1, 0], torch.tensor([0.55, 1], dtype=torch.float64), atol=1e-6, rtol=0)
    x = torch.tensor([0.0, 0.3, 0.449, 0.475, 0.5, 0.525, 0.551, 1.0], dtype=torch.float64)
    positions = torch.stack([x, torch.full_like(x, 0.5), torch.full_like(x, 0.0)], 1)
    found = [weight_in_tile(positions, wide[c], extents[c]) for c in range(2)]
    expected = torch.tensor([1, 1, 1, 0.75, 0.5, 0.25, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1], 1 - expected, atol=1e-5, rtol=0)


def test_fields_attend_to_occupied_space() -> None:
    """A focus has nearly all of a cell's points, is finite, and does not follow one that is far off."""
    points = torch.randn(2000, 3, generator=torch.Generator().manual_seed(3)) * 0.3
    cells = partition(points, 4, Domain.unbounded())
    boxes = focuses(points, cells, 0.15)
    assert boxes.isfinite().all() and (boxes[:, 1] > boxes[:, 0]).all()
    for number in range(4):
        own = points[cells.of(points) == number].double()
        inside = ((own >= boxes[number, 0]) & (own <= boxes[number, 1])).all(1).double().mean()
        assert inside > 0.98
    far = torch.cat([points, torch.tensor([[1e4, 1e4, 1e4]])])
    trimmed, whole = (float(focuses(far, cells, 0.15, trim=trim).abs().max()) for trim in (True, False))
    assert trimmed < 1.5 < whole < 2.5, "where it does, no further than half as far as infinity: 2, and widened"
    alone = focuses(points[:1], cells, 0.15)
    assert alone.isfinite().all() and (alone[:, 1] > alone[:, 0]).all(), "of cells without points too"


def test_cameras_are_weighed_by_distance() -> None:
    boxes = widened(torch.tensor([[[0.0, 0, 0], [2, 2, 2]], [[2, 0, 0], [4, 2, 2]]]), 0.5)
    origins = torch.tensor([[0.2, 1, 1], [2.0, 1, 1], [1.9, 1, 1], [9.0, 1, 1]])
    weights = camera_weights(origins, boxes, torch.tensor([0, 1, 0, 1]))
    torch.testing.assert_close(weights.sum(1), torch.ones(4))
    assert weights[0].tolist() == [1, 0] and weights[3].tolist() == [0, 1], "at home, however far"
    assert weights[1].tolist() == pytest.approx([0.5, 0.5])
    assert float(weights[2, 0] / weights[2, 1]) == pytest.approx((1.1 / 0.9) ** 4, rel=1e-4)


def test_whole_rays_and_shares() -> None:
    hits = torch.tensor([[True, False, True], [False, False, False], [True, False, False]])
    ray, segments = whole_rays(hits, torch.tensor([[1.0], [2.0], [3.0]]), torch.full((3, 3), 9.0))
    assert ray.tolist() == [0, 2, 0] and segments.near.tolist() == [1, 3, 1] and segments.far.tolist() == [9, 9, 9]
    assert segments.begins == (0, 2, 2, 3) and cell_of(segments).tolist() == [0, 0, 2] and segments.rays == 3
    assert segments.order.tolist() == [[0], [1], [2]] and segments.counts.tolist() == [1, 1, 1]
    g = torch.Generator().manual_seed(1)
    origins, ends = torch.rand(7, 3, generator=g), torch.full((7,), 5.0)
    one = clip(
        origins,
        torch.randn(7, 3, generator=g),
        ends * 0,
        ends,
        torch.tensor([[[0.0, 0, 0], [1, 1, 1]]], dtype=torch.float64),
    )
    shares = round_robin(one, 3)
    assert shares.begins == (0, 2, 4, 7) and torch.equal(shares.order, one.order) and shares.near is one.near
