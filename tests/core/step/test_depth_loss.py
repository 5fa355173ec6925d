"""The loss of depth: its formula, pixel by pixel; its gradient; and what must not spoil it."""

import math
from dataclasses import replace

import torch

from ns_multigpu.core.observations import Observations
from ns_multigpu.core.step.depth_loss import depth_loss, keypoints
from ns_multigpu.core.types import Patch, Pixels, View
from tests.strategies.scene import look_at

WIDTH, HEIGHT, SCALE = 19, 14, 2.5


def make_view() -> View:
    """Return a camera among points: some are behind it, some outside of its image, and one is at each corner."""
    g, count = torch.Generator().manual_seed(6), 60
    viewmat = look_at([2.0, 1.0, 0.5], [0.0, 0.0, 0.0])
    K = torch.tensor([[17.0, 0, 9.2], [0, 18.5, 7.4], [0, 0, 1]]).double()
    rays = torch.rand(count, 3, generator=g, dtype=torch.float64) * torch.tensor([2.0, 2.0, 4.0]) - 1
    rays[:, 2].abs_()
    rays[0::9, 2] *= -1
    corners = torch.tensor([[1e-3, 1e-3], [WIDTH - 1e-3, 0.2], [0.4, HEIGHT - 1e-3], [WIDTH - 0.3, HEIGHT - 0.1]])
    rays[:4] = torch.cat([(corners - K[:2, 2]) / torch.tensor([17.0, 18.5]), torch.ones(4, 1)], dim=1) * 1.7
    points = (rays - viewmat[:3, 3]) @ viewmat[:3, :3]
    ids = torch.full((count + 5,), -1, dtype=torch.int32)
    ids[:count] = torch.randperm(count, generator=g).int()
    return View(viewmat, K, WIDTH, HEIGHT, observations=Observations(points, ids, SCALE))


def make_depth(hole: bool = False) -> torch.Tensor:
    depth = 0.5 + 2 * torch.rand(HEIGHT, WIDTH, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    if hole:
        depth[4:9, 5:12] = 0.0
    return depth


def of(depth: torch.Tensor, patch: Patch, view: View) -> Pixels:
    x0, y0, x1, y1 = patch.rendered(view)
    piece = depth[y0:y1, x0:x1]
    return Pixels(patch, piece.expand(-1, -1, 3), torch.ones_like(piece), piece)


def plain(depth: torch.Tensor, view: View) -> tuple[float, int]:
    """Return the loss, a number after the other, and how many keypoints there are."""
    table, observed = depth[..., 0].tolist(), view.observations
    assert observed is not None
    (fx, _, cx), (_, fy, cy), _ = view.K.tolist()
    errors: list[float] = []
    for number in observed.ids.tolist():
        if number < 0:
            continue
        point = [*observed.points[number].tolist(), 1.0]
        x, y, z = (sum(a * b for a, b in zip(row, point, strict=True)) for row in view.viewmat[:3].tolist())
        if z <= 0:
            continue
        u, v = fx * x / z + cx, fy * y / z + cy
        if not (0 <= u < view.width and 0 <= v < view.height):
            continue
        # Between the four pixels whose middles are nearest; beyond the outermost middles, as there.
        u, v = min(max(u - 0.5, 0.0), view.width - 1.0), min(max(v - 0.5, 0.0), view.height - 1.0)
        drawn = 0.0
        for row in (math.floor(v), math.floor(v) + 1):
            for column in (math.floor(u), math.floor(u) + 1):
                weight = (1 - abs(u - column)) * (1 - abs(v - row))
                if weight > 0 and table[row][column] > 0:
                    drawn += weight / table[row][column]
        errors.append(abs(drawn - 1 / z))
    return SCALE * sum(errors) / max(len(errors), 1), len(errors)


def test_the_formula() -> None:
    view = make_view()
    for hole in (False, True):
        depth = make_depth(hole)
        expected, count = plain(depth, view)
        assert 20 < count < 50
        found = depth_loss(of(depth, Patch.whole(0, view), view), view)
        torch.testing.assert_close(float(found), expected, rtol=1e-12, atol=0)
        assert int(keypoints(view).inside.sum()) == count


def test_the_gradient() -> None:
    view, whole = make_view(), Patch.whole(0, make_view())
    depth = make_depth().requires_grad_()
    assert torch.autograd.gradcheck(lambda d: depth_loss(of(d, whole, view), view), depth, fast_mode=True)
    hole = make_depth(hole=True).requires_grad_()
    (found,) = torch.autograd.grad(depth_loss(of(hole, whole, view), view), hole)
    assert bool(found.isfinite().all()) and not bool(found[4:9, 5:12].any()) and int(found.count_nonzero()) > 40
    assert float(found.abs().max()) < 10, "next to a hole it is bounded"


def test_points_on_the_plane_have_zero_loss() -> None:
    """Disparities of a plane are linear on the screen: between pixels, too, they are exact."""
    view = make_view()
    a, b, c = 0.03, -0.02, 0.9  # disparity = a x + b y + c, at pixels' places
    y, x = torch.meshgrid(torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5, indexing="ij")
    depth = 1 / (a * x.double() + b * y.double() + c)[..., None]
    g = torch.Generator().manual_seed(1)
    places = 0.5 + torch.rand(30, 2, generator=g).double() * torch.tensor([WIDTH - 1.0, HEIGHT - 1.0])
    far = 1 / (a * places[:, 0] + b * places[:, 1] + c)
    seen = torch.cat([(places - view.K[:2, 2]) / view.K.diagonal()[:2], torch.ones(30, 1)], dim=1) * far[:, None]
    points = (seen - view.viewmat[:3, 3]) @ view.viewmat[:3, :3]
    view = replace(view, observations=Observations(points, torch.arange(30, dtype=torch.int32), SCALE))
    assert float(depth_loss(of(depth, Patch.whole(0, view), view), view)) < 1e-12


def test_views_that_observe_nothing() -> None:
    view, depth = make_view(), make_depth().requires_grad_()
    assert view.observations is not None
    nowhere = torch.tensor([[math.nan] * 3, [math.inf] * 3, [-math.inf, 0.0, 0.0]]).double()
    for ids, points in (
        (view.observations.ids[:0], view.observations.points),
        (torch.full((7,), -1, dtype=torch.int32), view.observations.points),
        (torch.arange(3, dtype=torch.int32), nowhere),
    ):
        blind = replace(view, observations=Observations(points, ids, SCALE))
        loss = depth_loss(of(depth, Patch.whole(0, view), blind), blind)
        assert float(loss.detach()) == 0 and not bool(torch.autograd.grad(loss, depth)[0].any())


def test_a_pose_that_is_optimized_moves_keypoints_and_gets_no_gradient_of_them() -> None:
    view = make_view()
    pose = view.viewmat.clone().requires_grad_()
    moved = replace(view, viewmat=pose)
    assert not depth_loss(of(make_depth(), Patch.whole(0, view), view), moved).requires_grad
    with torch.no_grad():
        pose[2, 3] += 0.1
    assert float((keypoints(moved).depths - keypoints(view).depths)[keypoints(view).inside].max()) > 0.09
