"""The loss of normal maps: its formula for rendered normals and for those of depth, and its gradient."""

from dataclasses import replace

import torch

from ns_multigpu.core.observations import Observations
from ns_multigpu.core.step.normal_map_loss import normal_map_loss, normals_of_depth
from ns_multigpu.core.types import Patch, Pixels, View
from tests.core.step.test_depth_loss import HEIGHT, WIDTH, make_depth, make_view


def directed(count: int = 60) -> View:
    """Return a view with normals in directions, some of them outside of its image."""
    view, g = make_view(), torch.Generator().manual_seed(8)
    places = torch.rand(count, 2, generator=g).double() * torch.tensor([WIDTH + 6.0, HEIGHT + 6.0]) - 3
    rays = torch.cat([(places - view.K[:2, 2]) / view.K.diagonal()[:2], torch.ones(count, 1)], dim=1)
    normals = torch.nn.functional.normalize(torch.randn(count, 3, generator=g).double(), dim=1)
    ids = torch.full((count + 5,), -1, dtype=torch.int32)
    ids[:count] = torch.randperm(count, generator=g).int()
    return replace(view, normals=Observations(rays, ids, 1.0, normals))


def drawn(depth: torch.Tensor, patch: Patch, view: View, rendered: bool = False) -> Pixels:
    x0, y0, x1, y1 = patch.rendered(view)
    g = torch.Generator().manual_seed(3)
    alpha, normals = (torch.rand(HEIGHT, WIDTH, n, generator=g).double()[y0:y1, x0:x1] for n in (1, 3))
    extra = {"normals": normals} if rendered else {}
    return Pixels(patch, alpha.expand(-1, -1, 3), alpha, depth[y0:y1, x0:x1], extra=extra)


def plain(pixels: Pixels, view: View) -> float:
    """Return the loss of a whole view, a sample after the other."""
    assert view.normals is not None and view.normals.normals is not None and pixels.depth is not None
    shown = pixels.extra.get("normals", normals_of_depth(pixels.depth, view, (0, 0)) * pixels.alpha)
    (fx, _, cx), (_, fy, cy), _ = view.K.tolist()
    errors: list[float] = []
    for number in view.normals.ids.tolist():
        if number < 0:
            continue
        x, y, _ = view.normals.points[number].tolist()
        u, v = fx * x + cx, fy * y + cy
        if 0 <= u < WIDTH and 0 <= v < HEIGHT:
            there = view.viewmat[:3, :3] @ shown[int(v), int(u)]
            errors.append(1 - float(there @ view.normals.normals[number]))
    assert 25 < len(errors) < 55
    return sum(errors) / len(errors)


def test_the_formula_of_rendered_normals_and_of_those_of_depth() -> None:
    view, whole = directed(), Patch.whole(0, directed())
    for rendered in (False, True):
        pixels = drawn(make_depth(), whole, view, rendered)
        torch.testing.assert_close(float(normal_map_loss(pixels, view)), plain(pixels, view), rtol=1e-12, atol=0)


def test_it_is_zero_where_the_plane_is_the_maps() -> None:
    view = directed()
    assert view.normals is not None
    normal = torch.nn.functional.normalize(torch.tensor([0.2, -0.3, -1.0]).double(), dim=0)
    y, x = torch.meshgrid(torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5, indexing="ij")
    rays = torch.stack([(x.double() - view.K[0, 2]) / view.K[0, 0], (y.double() - view.K[1, 2]) / view.K[1, 1]], dim=-1)
    rays = torch.cat([rays, torch.ones_like(rays[..., :1])], dim=-1)
    inner = rays[1:-1, 1:-1].reshape(-1, 3)  # at the image's border depth has no normal
    ids = torch.arange(len(inner), dtype=torch.int32)
    view = replace(view, normals=Observations(inner, ids, 1.0, normal.expand(len(inner), 3)))
    depth = -2 / (rays @ normal)[..., None]
    full = torch.ones_like(depth)
    found = normal_map_loss(Pixels(Patch.whole(0, view), full.expand(-1, -1, 3), full, depth), view)
    assert abs(float(found)) < 1e-12


def test_the_gradient_is_bounded_next_to_pixels_without_depth() -> None:
    view, whole = directed(), Patch.whole(0, directed())
    depth = make_depth().requires_grad_()
    assert torch.autograd.gradcheck(lambda d: normal_map_loss(drawn(d, whole, view), view), depth, fast_mode=True)
    stripes = make_depth()
    stripes[:, 1::2] = 0  # drawn columns between empty ones: the difference across them has no length
    stripes.requires_grad_()
    (found,) = torch.autograd.grad(normal_map_loss(drawn(stripes, whole, view), view), stripes)
    assert bool(found.isfinite().all()) and float(found.abs().max()) < 10


def test_views_without_normals_have_no_loss() -> None:
    view, depth = directed(), make_depth().requires_grad_()
    assert view.normals is not None
    blind = replace(view, normals=replace(view.normals, ids=torch.full((7,), -1, dtype=torch.int32)))
    loss = normal_map_loss(drawn(depth, Patch.whole(0, view), blind), blind)
    assert float(loss.detach()) == 0 and not bool(torch.autograd.grad(loss, depth)[0].any())
