"""3D convexes: the reference by what the paper says; the C++ twin by it."""

import pytest
import torch
from scipy.spatial import ConvexHull

from cuda_ext.ops.raster.convexes import CONVEXES, CORNERS
from cuda_ext.reference.convexes import hull_lines
from tests.cuda_ext.convex_scene import make_scene, project
from tests.cuda_ext.surface_scene import HEIGHT, WIDTH, whole

DRAWN = {0, 3, 6}
"""Of the scene's special convexes those that are drawn: see `make_scene`."""


def edges_of(lines: torch.Tensor) -> list[tuple[float, float, float]]:
    """Unit normals and offsets of a row's lines, in one order whatever the corners'."""
    by_corner = lines.view(CORNERS, 3)
    by_corner = by_corner[(by_corner[:, :2] != 0).any(-1)]
    unit = by_corner / by_corner[:, :2].norm(dim=-1, keepdim=True)
    return sorted(tuple(row) for row in unit.tolist())


def test_lines_are_those_of_the_hull_of_the_projected_corners() -> None:
    scene = make_scene(60, 1, spread=1.0, grad=False)
    rows = project(scene)
    checked = 0
    for k in range(8, 60):
        if int(rows.radii[k, 0]) <= 0:
            continue
        seen = scene.means[k] + scene.corners[k].view(CORNERS, 3)
        pixels = (scene.Ks[0] @ seen.T).T
        places = pixels[:, :2] / pixels[:, 2:] - rows.means2d[k]
        hull = ConvexHull(places.numpy())
        expected = sorted(tuple(row) for row in hull.equations.tolist())
        torch.testing.assert_close(torch.tensor(edges_of(rows.lines[k])), torch.tensor(expected), rtol=1e-6, atol=1e-9)
        # As long as its edge, times d delta.
        pixel = scene.means[k, 2] / (scene.Ks[0, 0, 0] * scene.Ks[0, 1, 1]).sqrt()
        lengths = rows.lines[k].view(CORNERS, 3)[:, :2].norm(dim=-1).sum() / (pixel * scene.deltas[k])
        assert abs(float(lengths) - hull.area) < 1e-6 * hull.area  # scipy's word for a perimeter
        assert abs(float(rows.sharpness[k] - pixel * scene.sigmas[k])) < 1e-9 * float(rows.sharpness[k])
        checked += 1
    assert checked > 30


SQUARE = [[0.0, 0], [2, 0], [2, 2], [0, 2]]


@pytest.mark.parametrize(
    ("more", "starts"),
    [
        ([[1.0, 1], [1, 1]], {0, 1, 2, 3}),  # inside, twice
        ([[1.0, 0], [2, 1]], {0, 1, 2, 3}),  # in the middle of edges
        ([[2.0, 2], [0, 0]], {0, 1, 2, 3}),  # at corners: the first of equals counts
        ([[3.0, 0], [4, 0]], {0, 2, 3, 5}),  # beyond, on one line: the outermost counts
    ],
)
def test_ties_are_broken_the_same_way(more: list[list[float]], starts: set[int]) -> None:
    places = torch.tensor([SQUARE + more]).double()
    lines, count = hull_lines(places, torch.ones(1).double())
    found = {k for k in range(CORNERS) if bool((lines.view(CORNERS, 3)[k, :2] != 0).any())}
    assert found == starts and int(count) == 4
    turned, _ = hull_lines(places.flip(1), torch.ones(1).double())
    assert edges_of(turned[0]) == edges_of(lines[0])
    _, count = hull_lines(torch.arange(12.0).view(1, 6, 2), torch.ones(1))
    assert int(count) < 3


def test_special_convexes_are_drawn_or_not() -> None:
    rows = project(make_scene(views=1, grad=False))
    assert {k for k in range(7) if int(rows.radii[k, 0]) > 0} == DRAWN
    assert all(bool((value[[1, 2, 4, 5]] == 0).all()) for value in rows)


def test_alpha_is_the_papers_indicator() -> None:
    """By signed distances in pixels, computed from the hull's corners; edges' lengths are in them."""
    scene = make_scene(40, 1, spread=0.6, seed=4, grad=False)
    rows = project(scene)
    shown = 0
    for k in (rows.radii[:, 0] > 0).nonzero()[:, 0].tolist():
        seen = scene.means[k] + scene.corners[k].view(CORNERS, 3)
        pixels = (scene.Ks[0] @ seen.T).T
        places = pixels[:, :2] / pixels[:, 2:]
        order = ConvexHull(places.numpy()).vertices  # counterclockwise
        corners = places[order.copy()]
        along = corners.roll(-1, 0) - corners
        y, x = torch.meshgrid(torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5, indexing="ij")
        to = torch.stack([x, y], -1).double().view(-1, 1, 2) - corners
        distances = -(along[:, 0] * to[..., 1] - along[:, 1] * to[..., 0])  # positive outside, times the edge's length
        d = scene.means[k, 2] / (scene.Ks[0, 0, 0] * scene.Ks[0, 1, 1]).sqrt()
        phi = torch.log(torch.exp(d * scene.deltas[k] * (distances - distances.amax(-1, keepdim=True))).sum(-1))
        phi = phi + d * scene.deltas[k] * distances.amax(-1)
        expected = (scene.opacities[k] / (1 + torch.exp(d * scene.sigmas[k] * phi))).clamp(max=0.999)
        expected = torch.where(expected >= 1 / 255, expected, 0.0)
        tiles = -(-WIDTH // 16) * -(-HEIGHT // 16)
        lists = (torch.arange(tiles + 1).int(), torch.full((tiles,), k).int())
        alpha = CONVEXES.rasterize(rows, scene.colors, *lists, whole(1)).alphas
        torch.testing.assert_close(alpha, expected, rtol=1e-7, atol=1e-9)
        # Nothing shows outside of its radii.
        away = torch.maximum(
            (x - rows.means2d[k, 0]).abs() - rows.radii[k, 0], (y - rows.means2d[k, 1]).abs() - rows.radii[k, 1]
        )
        assert not bool((alpha.view(HEIGHT, WIDTH)[away > 0] > 0).any())
        shown += bool((away > 0).any())
    assert shown > 10


def test_image_is_independent_of_depth_and_resolution() -> None:
    """A convex twice as far and twice as large is the same picture; so is one of twice the pixels."""
    scene = make_scene(24, 1, grad=False)
    rows = project(scene)
    far = project(
        scene._replace(
            means=scene.means * 2, corners=scene.corners * 2, deltas=scene.deltas / 2, sigmas=scene.sigmas / 2
        )
    )
    same = (rows.radii[:, 0] > 0) & (far.radii[:, 0] > 0)
    assert int(same.sum()) > 10
    torch.testing.assert_close(far.lines[same], rows.lines[same])
    torch.testing.assert_close(far.sharpness[same], rows.sharpness[same])
    fine = project(scene._replace(Ks=torch.cat([scene.Ks[:, :2] * 2, scene.Ks[:, 2:]], 1)))
    same = (rows.radii[:, 0] > 0) & (fine.radii[:, 0] > 0)
    middles = (one.lines.view(-1, CORNERS, 3)[same, :, 2] * one.sharpness[same, None] for one in (rows, fine))
    torch.testing.assert_close(*middles)
