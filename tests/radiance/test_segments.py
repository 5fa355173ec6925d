"""Rays clipped at cells: no gaps, no sample across a face, the right order."""

import math

import pytest
import torch

from ns_multigpu.radiance.contraction import Domain
from ns_multigpu.radiance.segments import clip
from tests.radiance.scene import cut, rays

BOX = Domain.box(torch.tensor([[-1.0, -1, -1], [1, 1, 1]]))


@pytest.mark.parametrize("cells", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_segments_of_a_ray_follow_one_another(cells: int, dtype: torch.dtype) -> None:
    origins, directions = (x.to(dtype) for x in rays(300))
    part, near = cut(cells), torch.full((300,), 0.05, dtype=dtype)
    segments = clip(origins, directions, near, near * 20000, part.boxes())
    padded = torch.cat([segments.near, segments.near.new_full((1,), math.nan)])
    ends = torch.cat([segments.far, segments.far.new_full((1,), math.nan)])
    cells_seen = set[int]()
    for ray, row in enumerate(segments.order):
        mine = row[row < len(segments)]
        assert len(mine) == segments.counts[ray] and bool((segments.ray[mine] == ray).all())
        assert padded[mine[0]] == near[ray] and ends[mine[-1]] == near[ray] * 20000
        assert torch.equal(ends[mine[:-1]], padded[mine[1:]]), "no gap and no overlap, bit for bit"
        middles = origins[ray] + directions[ray] * ((segments.near + segments.far)[mine] / 2)[:, None]
        wide = (segments.far - segments.near)[mine] > 1e-5
        of = torch.bucketize(mine, torch.tensor(segments.begins), right=True) - 1
        assert torch.equal(part.of(middles)[wide], of[wide])
        cells_seen.update(of.tolist())
    assert cells_seen == set(range(cells))


def test_order_is_that_of_the_tree() -> None:
    """From one place, Splaxel's order of the cells is each ray's."""
    part = cut(8, BOX)
    _, directions = rays(200)
    origin = torch.tensor([0.3, -0.2, 0.4], dtype=torch.float64)
    near = torch.zeros(200, dtype=torch.float64)
    segments = clip(origin.expand(200, 3), directions, near, near + 100, part.boxes())
    place = {cell: k for k, cell in enumerate(part.tree.order((0.3, -0.2, 0.4)))}
    for row in segments.order:
        mine = row[row < len(segments)]
        cells = (torch.bucketize(mine, torch.tensor(segments.begins), right=True) - 1).tolist()
        assert [place[cell] for cell in cells] == sorted(place[cell] for cell in cells)


def test_rays_that_miss_all_cells_have_no_segment() -> None:
    origins = torch.tensor([[5.0, 0, 0], [5.0, 0, 0], [0.0, 0, 0], [0.0, 3, 0]])
    directions = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0], [0.0, 1, 0], [1.0, 0, 0]])
    ends = torch.zeros(4), torch.full((4,), 100.0)
    segments = clip(origins, directions, *ends, cut(2, BOX).boxes())
    assert segments.counts[0] == 0 and segments.counts[3] == 0, "behind it, and next to it along an axis"
    assert segments.counts[1] > 0 and segments.counts[2] > 0
    assert bool((segments.order[0] == len(segments)).all())


def test_a_ray_in_a_face_is_above() -> None:
    part = cut(2, BOX)
    split = part.tree.splits[0]
    origin, direction = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    origin[0, split.axis], direction[0, (split.axis + 1) % 3] = split.plane, 1.0
    segments = clip(origin, direction, torch.zeros(1).double(), torch.full((1,), 9.0).double(), part.boxes())
    assert segments.begins == (0, 0, 1), "in one cell, and not in both"


def test_no_rays() -> None:
    none = torch.zeros(0, 3)
    segments = clip(none, none, torch.zeros(0), torch.zeros(0), cut(3).boxes())
    assert len(segments) == 0 and segments.begins == (0, 0, 0, 0) and segments.order.shape == (0, 0)
