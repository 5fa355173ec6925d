"""Cells of space: equally many points in each, near cubes, convex in the world."""

import math

import pytest
import torch

from ns_multigpu.radiance.contraction import Domain, contract, expand
from ns_multigpu.radiance.partition import distance, few_views, partition, points_along, spacing
from tests.radiance.scene import cut


def _cloud(count: int, *scales: float) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(scales)


def test_contraction_is_undone() -> None:
    x = torch.tensor([-1e6, -3.0, -1.0, -0.2, 0.0, 0.5, 1.0, 7.0, math.inf], dtype=torch.float64)
    assert contract(x)[-1] == 2 and contract(x).abs().max() <= 2
    torch.testing.assert_close(expand(contract(x)), x, rtol=1e-9, atol=0)
    edges = torch.tensor([-2.0, 2.0])
    assert expand(edges).tolist() == [-math.inf, math.inf]


def test_contraction_has_a_gradient_everywhere() -> None:
    x = torch.tensor([-4.0, -1.0, 0.0, 1.0, 5.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(contract, x[[0, 2, 4]])
    (grad,) = torch.autograd.grad(contract(x).sum(), x)
    torch.testing.assert_close(grad, torch.tensor([1 / 16, 1, 1, 1, 1 / 25], dtype=torch.float64))


@pytest.mark.parametrize("cells", [1, 2, 3, 5, 8])
def test_cells_have_equally_many_points(cells: int) -> None:
    points = _cloud(1200, 1.0, 0.6, 3.0)
    counts = torch.bincount(partition(points, cells, Domain.unbounded()).of(points), minlength=cells)
    assert counts.tolist() == pytest.approx([1200 / cells] * cells, abs=3)


def test_a_long_cloud_is_cut_across_its_length() -> None:
    """Two halves of a long box are closer to cubes than two slices of it."""
    for axis in range(3):
        scales = [0.05, 0.05, 0.05]
        scales[axis] = 0.5
        assert partition(_cloud(400, *scales), 2, Domain.unbounded()).tree.splits[0].axis == axis


def test_parts_are_judged_both() -> None:
    """Across y the halves are 0.9 : 0.5; across x 0.45 : 1, which is further from a cube."""
    g = torch.Generator().manual_seed(0)
    points = torch.rand(4000, 3, generator=g) * torch.tensor([0.9, 1.0, 0.7])
    assert partition(points, 2, Domain.unbounded()).tree.splits[0].axis == 1


def test_cells_fill_space_and_share_none_of_it() -> None:
    for domain in (Domain.unbounded(), Domain.box(torch.tensor([[-1.0, -1, -1], [1, 1, 2]]))):
        extents = cut(7, domain).extents()
        volume = (extents[:, 1] - extents[:, 0]).prod(1)
        whole = math.prod(b - a for a, b in zip(domain.lower, domain.upper, strict=True))
        assert bool((volume > 0).all()) and float(volume.sum()) == pytest.approx(whole)


def test_a_position_is_in_the_box_of_its_cell() -> None:
    part = cut(6)
    where = _cloud(300, 4.0, 4.0, 4.0).double()
    boxes = part.boxes()[part.of(where)]
    assert bool(((where >= boxes[:, 0]) & (where <= boxes[:, 1])).all())


def test_points_outside_a_box_do_not_count() -> None:
    box = Domain.box(torch.tensor([[-1.0, -1, -1], [1, 1, 1]]))
    inside = _cloud(200, 0.2, 0.1, 0.1)
    away = torch.full((900, 3), 5.0)
    assert partition(torch.cat([inside, away]), 4, box).tree == partition(inside, 4, box).tree


@pytest.mark.parametrize("points", [torch.zeros(0, 3), torch.full((50, 3), 0.4), torch.full((9, 3), math.nan)])
def test_coincident_points_give_cells_with_volume(points: torch.Tensor) -> None:
    extents = partition(points, 8, Domain.unbounded()).extents()
    assert bool(((extents[:, 1] - extents[:, 0]) > 0).all())


def test_many_coincident_points_among_others_give_cells_with_volume() -> None:
    """A second plane would lie where the first one does."""
    points = torch.cat([torch.full((300, 3), 0.4), 0.3 + 0.2 * torch.rand(200, 3, generator=torch.Generator())])
    extents = partition(points, 16, Domain.unbounded()).extents()
    assert bool(((extents[:, 1] - extents[:, 0]) > 0).all())


def test_no_cells_and_no_volume_are_refused() -> None:
    with pytest.raises(ValueError, match="0 cells"):
        partition(torch.zeros(1, 3), 0, Domain.unbounded())
    with pytest.raises(ValueError, match="no volume"):
        Domain.box(torch.tensor([[0.0, 0, 0], [1, 0, 1]]))


def test_points_along_rays_are_spaced_as_first_samples() -> None:
    t = torch.tensor([0.05, 0.7, 1.0, 3.0, 900.0], dtype=torch.float64)
    torch.testing.assert_close(distance(spacing(t)), t)
    origins, directions = torch.zeros(2, 3), torch.tensor([[1.0, 0, 0], [0, 0, -1.0]])
    points = points_along(origins, directions, 0.05, 1000.0, 64)
    assert points.shape == (128, 3) and int((points[:64, 0] < 1).sum()) == pytest.approx(31, abs=1)
    assert bool((points[64:, 2] < 0).all())


@pytest.mark.parametrize(("views", "cells", "said"), [(149, 2, True), (150, 2, False), (43, 1, False), (299, 4, True)])
def test_few_views_for_many_cells_are_reported(views: int, cells: int, said: bool) -> None:
    text = few_views(views, cells)
    assert (text is not None) == said
    assert text is None or (f"{views} training views for {cells} cells" in text and "--machine.num-devices 1" in text)
