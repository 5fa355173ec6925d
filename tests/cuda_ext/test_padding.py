"""`cull_capacity` and the padding it makes: dead rows for every operator, on CPU and in the reference."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import cuda_ext
from tests.cuda_ext.scenes import Scene, random_scene

INPUTS = ("means", "quats", "scales", "opacities", "viewmats", "sh_dc", "sh_rest")


def cull_capacity(scene: Scene, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """On the whole views."""
    cameras = (scene.viewmats, scene.Ks, scene.sizes)
    return cuda_ext.cull_capacity(scene.means, scene.scales, scene.opacities, *cameras, scene.whole, capacity)


def outputs_and_gradients(
    scene: Scene, rows: tuple[Tensor, Tensor], keep: int, **settings: bool
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Projection and colours of all rows, and the gradients of a fixed weighting of the first `keep`; what comes in for
    the others is not zero."""
    leaves = [getattr(scene, name).detach().clone().requires_grad_() for name in INPUTS]
    means, quats, scales, opacities, viewmats, dc, rest = leaves
    out = cuda_ext.project(means, quats, scales, opacities, viewmats, scene.Ks, scene.sizes, *rows, **settings)
    centers = -(viewmats[:, :3, :3].mT @ viewmats[:, :3, 3:]).squeeze(-1)
    colors = cuda_ext.sh_colors(3, means, centers, dc, rest, *rows)
    generator = torch.Generator().manual_seed(5)
    floats = (*out[:4], colors)
    weights = [torch.rand(o[:keep].shape, generator=generator, dtype=torch.float64).to(o) for o in floats]
    given = [torch.cat([w, torch.ones_like(o[keep:])]) for w, o in zip(weights, floats, strict=True)]
    return (*out, colors), torch.autograd.grad(floats, leaves, given)


@pytest.mark.parametrize("views", [1, 3])
def test_rows_then_padding(either: str, views: int) -> None:
    scene = random_scene(views=views)
    view_ids, point_ids = scene.cull()
    rows = len(view_ids)
    assert rows > 50
    for capacity in (rows, rows + 1, rows + 77):
        padded = cull_capacity(scene, capacity)
        assert padded[2].dtype == torch.int64 and padded[2].tolist() == [rows]
        assert torch.equal(padded[0][:rows], view_ids) and torch.equal(padded[1][:rows], point_ids)
        assert padded[0][rows:].tolist() == [views - 1] * (capacity - rows)
        assert padded[1][rows:].tolist() == [-1] * (capacity - rows)


def test_overflow_is_told(either: str) -> None:
    scene = random_scene()
    view_ids, point_ids = scene.cull()
    for capacity in (0, 1, len(view_ids) - 1):
        padded = cull_capacity(scene, capacity)
        assert padded[2].tolist() == [len(view_ids)]
        assert torch.equal(padded[0], view_ids[:capacity]) and torch.equal(padded[1], point_ids[:capacity])


@pytest.mark.parametrize(("points", "views"), [(0, 2), (5, 0), (0, 0)])
def test_nothing_to_see(either: str, points: int, views: int) -> None:
    scene = random_scene(points=points, views=views)
    view_ids, point_ids, count = cull_capacity(scene, 4)
    assert count.tolist() == [0] and point_ids.tolist() == [-1] * 4 and view_ids.tolist() == [max(views - 1, 0)] * 4
    if views:
        out = scene.project(view_ids, point_ids)
        assert all(o.shape[0] == 4 and (o == 0).all() for o in out)


def test_negative_capacity(either: str) -> None:
    with pytest.raises(ValueError, match="capacity must be at least 0, not -1"):
        cull_capacity(random_scene(points=3), -1)


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("views", [1, 2])
def test_padding_is_dead(either: str, views: int, antialiased: bool) -> None:
    scene = random_scene(views=views, dtype=torch.float64)
    rows = scene.cull()
    keep = len(rows[0])
    padded = cull_capacity(scene, keep + 33)[:2]
    out, gradients = outputs_and_gradients(scene, rows, keep, antialiased=antialiased)
    padded_out, padded_gradients = outputs_and_gradients(scene, padded, keep, antialiased=antialiased)
    for whole, part in zip(padded_out, out, strict=True):
        assert torch.equal(whole[:keep], part) and (part != 0).any() and (whole[keep:] == 0).all()
    for name, got, want in zip(INPUTS, padded_gradients, gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=name)
        assert (want != 0).any(), name


@pytest.mark.usefixtures("native")
def test_padding_elsewhere_is_refused() -> None:
    scene = random_scene(points=10)
    for views, points in (([0, 1], [-1, 3]), ([1, 1], [-1, 3]), ([0, 0], [3, -1])):
        ids = [torch.tensor(ids, dtype=torch.int32) for ids in (views, points)]
        with pytest.raises(IndexError, match="does not exist"):
            scene.project(ids[0], ids[1])


@pytest.mark.usefixtures("native")
def test_opcheck() -> None:
    scene = random_scene(points=20)
    arguments = (scene.means, scene.scales, scene.opacities, scene.viewmats, scene.Ks, scene.sizes, scene.whole)
    torch.library.opcheck(torch.ops.ns_multigpu.cull_capacity, (*arguments, 0.3, 0.01, 1e9, 64))
