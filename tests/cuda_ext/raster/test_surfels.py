"""2D Gaussians: the reference by what the paper says and by gsplat's; the C++ twin by it."""

import torch
from gsplat.cuda._torch_impl_2dgs import _fully_fused_projection_2dgs

from cuda_ext.ops.raster.primitives import box_lists
from cuda_ext.ops.raster.surfels import SURFELS
from cuda_ext.reference.surfels import surfel_radii
from tests.cuda_ext.surface_scene import HEIGHT, WIDTH, whole
from tests.cuda_ext.surfel_scene import draw, make_scene, project

DRAWN = {0, 1, 3, 6}
"""Of the scene's special surfels those that are drawn: see `make_scene`."""


def test_rows_are_gsplats() -> None:
    scene = make_scene(400, 1, spread=4.0, grad=False)
    scales = torch.cat([scene.scales, torch.ones(400, 1).double()], dim=1)
    radii, means2d, depths, M, normals = _fully_fused_projection_2dgs(
        scene.means, scene.quats, scales, scene.viewmats, scene.Ks, WIDTH, HEIGHT, near_plane=0.2
    )
    rows = project(scene)
    drawn = (rows.radii[:, 0] > 0) & (radii[0] > 0)
    assert int(drawn.sum()) > 100
    for ours, theirs in (
        (rows.means2d, means2d[0]), (rows.depths, depths[0]), (rows.normals, normals[0]),
        (rows.transforms.view(-1, 3, 3), M[0].transpose(1, 2)),
    ):  # fmt: skip
        torch.testing.assert_close(ours[drawn], theirs[drawn], rtol=1e-9, atol=1e-9)
    assert torch.equal(surfel_radii(rows.transforms)[drawn].int(), radii[0][drawn])
    # Seen by gsplat's square of 3 sigma, and not drawn here: counted by its radius.
    counted = rows.radii[:, 0] < 0
    assert bool(counted.any()) and torch.equal(-rows.radii[counted, 0], radii[0][counted])
    # All splats of gsplat are drawn here or counted, except discs that touch the camera's plane.
    lost = (radii[0] > 0) & (rows.radii[:, 0] == 0)
    overlapping = (M[0, :, :2, 2].square().sum(-1) - depths[0].square()) >= -1e-6 * depths[0].square()
    assert bool(overlapping[2]) and not bool((lost & ~overlapping).any())


def test_special_surfels_are_drawn_or_not() -> None:
    rows = project(make_scene(views=1, grad=False))
    assert {k for k in range(7) if int(rows.radii[k, 0]) > 0} == DRAWN
    # A bound that touches the camera's plane is the whole view.
    assert float(rows.means2d[3, 0] - rows.radii[3, 0]) < 0 and float(rows.means2d[3, 0] + rows.radii[3, 0]) > WIDTH


def test_intersection_lies_on_the_ray_and_the_plane() -> None:
    """By the plane's equation in camera space, not by the transform."""
    scene = make_scene(60, 1, spread=0.8, seed=4, grad=False)
    rows = project(scene)
    for k in range(8, 60):
        if int(rows.radii[k, 0]) <= 0:
            continue
        normal, mean = rows.normals[k], scene.means[k]
        pixel = torch.tensor([rows.means2d[k, 0] + 1.3, rows.means2d[k, 1] - 0.8, 1.0]).double()
        ray = torch.linalg.inv(scene.Ks[0]) @ pixel
        place = ray * (normal @ mean) / (normal @ ray) - mean
        w, x, y, z = torch.nn.functional.normalize(scene.quats[k], dim=0)
        first = torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)])
        second = torch.linalg.cross(
            torch.stack([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)]), first
        )
        u, v = place @ first / scene.scales[k, 0], place @ second / scene.scales[k, 1]
        at = rows.transforms[k].view(3, 3) @ torch.stack([u, v, torch.ones_like(u)])
        torch.testing.assert_close(at[:2] / at[2], pixel[:2], rtol=1e-8, atol=1e-8)


def test_nothing_shows_outside_of_its_radii() -> None:
    scene = make_scene(60, 1, spread=2.0, seed=2, grad=False)
    rows, patches = project(scene), whole(1)
    y, x = torch.meshgrid(torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5, indexing="ij")
    shown = 0
    for k in (rows.radii[:, 0] > 0).nonzero()[:, 0].tolist():
        # Every tile has it: what is drawn is what its alpha says.
        tiles = -(-WIDTH // 16) * -(-HEIGHT // 16)
        lists = (torch.arange(tiles + 1).int(), torch.full((tiles,), k).int())
        alpha = SURFELS.rasterize(rows, scene.colors, *lists, patches).alphas.view(HEIGHT, WIDTH)
        away = torch.maximum(
            (x - rows.means2d[k, 0]).abs() - rows.radii[k, 0], (y - rows.means2d[k, 1]).abs() - rows.radii[k, 1]
        )
        assert not bool((alpha[away > 0] > 0).any())
        shown += bool((alpha > 0).any())
    assert shown > 20


def test_distortion_and_median_equal_their_definitions() -> None:
    scene = make_scene(30, 1, spread=0.7, grad=False)
    rows = project(scene)
    lists = box_lists(rows, scene.view_ids, whole(1))
    _, pixels = draw(scene)
    order = rows.depths.argsort(stable=True)
    single = torch.eye(30).double()  # colour by colour: the weights of single splats
    weights = torch.stack(
        [
            SURFELS.rasterize(rows, single[:, k : k + 1].expand(-1, 3).contiguous(), *lists, whole(1)).colors[:, 0]
            for k in order
        ]
    )
    depths = rows.depths[order]
    apart = (depths[:, None] - depths[None]).abs()
    expected = torch.einsum("ip,jp,ij->p", weights, weights, apart)
    torch.testing.assert_close(pixels.distortion, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(pixels.depths, (weights * depths[:, None]).sum(0))
    torch.testing.assert_close(pixels.normals, weights.T @ rows.normals[order])
    before = 1 - torch.cat([torch.zeros_like(weights[:1]), weights.cumsum(0)[:-1]])
    for p in range(0, WIDTH * HEIGHT, 17):
        counted = [k for k in range(30) if weights[k, p] > 0 and before[k, p] > 0.5]
        assert float(pixels.median[p]) == (float(depths[counted[-1]]) if counted else 0.0)
