"""Occupancy grids, and steps along rays."""

import pytest
import torch

from ns_multigpu.radiance.integrals import COLOUR, DEPTH, Family, Samples
from ns_multigpu.radiance.occupancy import OccupancyGrid, between_gaps, kept_first, steps_along, with_gaps
from ns_multigpu.radiance.partition import spacing


def test_a_grid_finds_its_voxels() -> None:
    grid = OccupancyGrid(torch.zeros(4**3), 0.5)
    voxels = torch.arange(64)
    inside = torch.rand(64, 3, generator=torch.Generator().manual_seed(1)) * 0.98 + 0.01
    for voxel in (0, 13, 63):
        grid.values.zero_()
        grid.update(torch.tensor([voxel]), torch.tensor([0.9]))
        assert grid.occupied(grid.points(voxels, inside)).nonzero()[:, 0].tolist() == [voxel]
    low, high = grid.diagonals(torch.tensor([63]))
    assert low.tolist() == [[0.75] * 3] and high.tolist() == [[1.0] * 3]
    with pytest.raises(ValueError, match="no cube"):
        OccupancyGrid(torch.zeros(5), 0.5)


def test_occupancy_decays_and_threshold_follows_the_mean() -> None:
    grid = OccupancyGrid(torch.ones(8), 0.01)
    grid.update(torch.tensor([0, 0, 1]), torch.tensor([0.2, 0.99, 0.0]))
    assert grid.values[:3].tolist() == pytest.approx([0.99, 0.95, 0.95]) and float(grid.bar) == pytest.approx(0.01)
    grid.values.copy_(torch.tensor([0.004, *[0.0] * 7]))
    assert float(grid.bar) == pytest.approx(0.0005)
    assert int(grid.occupied(torch.rand(99, 3)).sum()) < 99, "before anything is opaque, the more opaque half is kept"


def test_steps_cover_a_segment() -> None:
    near, far = torch.tensor([[0.1], [0.3], [2.0]]), torch.tensor([[0.4], [0.9], [50.0]])
    whole = (torch.full((3, 1), 0.05), torch.full((3, 1), 1000.0))
    edges = steps_along((near, far), whole, 64, torch.tensor([[0.0], [0.3], [0.9]]))
    torch.testing.assert_close(edges[:, :1], near)
    torch.testing.assert_close(edges[:, -1:], far)
    assert (edges.diff(dim=1) >= 0).all()
    span = spacing(whole[1]) - spacing(whole[0])
    lengths = spacing(edges).diff(dim=1) / span
    assert float(lengths.max()) <= 1 / 64 + 1e-5
    inner = lengths[1][(lengths[1] > 0)][1:-1]
    torch.testing.assert_close(inner, torch.full_like(inner, 1 / 64), rtol=1e-3, atol=0)
    # A whole ray, whose last step would lie beyond infinity.
    edges = steps_along(whole, whole, 64, torch.full((3, 1), 0.5))
    assert (edges.diff(dim=1) >= 0).all() and float(edges.amax()) == 1000


def test_gaps_add_nothing() -> None:
    """The integrals over what is kept are those of all steps, if the others have no density."""
    g = torch.Generator().manual_seed(5)
    edges = torch.rand(4, 9, generator=g).sort(dim=1).values
    kept = torch.rand(4, 8, generator=g) > 0.5
    kept[2] = True
    density = torch.rand(4, 8, generator=g) * 5 * kept
    colour = torch.rand(4, 8, 3, generator=g)
    family = Family([COLOUR, DEPTH])
    expected = family.within(Samples(edges, density, edges, {"colour": colour}))
    places, there = kept_first(kept)
    assert places.shape == (4, 8) and torch.equal(there.sum(1), kept.sum(1))
    starts, ends = edges[:, :-1].gather(1, places), edges[:, 1:].gather(1, places)
    final = ends.gather(1, (there.sum(1, keepdim=True) - 1).clamp_min(0))
    starts, ends = torch.where(there, starts, final), torch.where(there, ends, final)
    spaced = with_gaps(starts, ends)
    few = Samples(
        spaced,
        between_gaps(density.gather(1, places)),
        spaced,
        {"colour": between_gaps(colour.gather(1, places[..., None].expand(-1, -1, 3)))},
    )
    torch.testing.assert_close(family.within(few), expected)
