"""`condition` and `project_axes`: the native operators and the reference against each other, textbook formulas, and 3D
Gaussians."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cuda_ext
from cuda_ext.reference.conditioning import product, rotations_4d
from tests.cuda_ext.moments import MOVING, moving_scene, projected_rows, with_gradients
from tests.cuda_ext.scenes import Scene
from tests.lib.ranks import DEVICES

OPS = torch.ops.ns_multigpu
F64 = torch.float64


def conditioned(view_times: Tensor, rows: tuple[Tensor, Tensor], *leaves: Tensor) -> cuda_ext.Moment:
    return cuda_ext.condition(*leaves, view_times, *rows)


def drawn(scene: Scene, view_ids: Tensor, antialiased: bool, *leaves: Tensor) -> cuda_ext.Projection:
    *points, viewmats = leaves
    return cuda_ext.project_axes(
        *points, viewmats, scene.Ks, sizes=scene.sizes, view_ids=view_ids, antialiased=antialiased
    )


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (F64, 1e-11)])
def test_condition_equals_reference(dtype: torch.dtype, rtol: float) -> None:
    scene, leaves, view_times = moving_scene(views=3, dtype=dtype)
    rows = scene.all_rows()
    run = partial(conditioned, view_times, rows)
    out, gradients = with_gradients(run, leaves)
    with cuda_ext.use_reference():
        expected, expected_gradients = with_gradients(run, leaves)
    for got, want in zip(out, expected, strict=True):
        assert_close(got, want, rtol=rtol, atol=rtol * 0.1)
    for name, got, want in zip(MOVING, gradients, expected_gradients, strict=True):
        assert want.norm() > 0 and (got - want).norm() <= rtol * want.norm(), name


def test_condition_gradcheck(either: str) -> None:
    scene, leaves, view_times = moving_scene(points=7, views=2, dtype=F64)
    assert torch.autograd.gradcheck(partial(conditioned, view_times, scene.all_rows()), leaves, atol=1e-5, rtol=1e-4)


def test_condition_is_that_of_the_covariance(either: str) -> None:
    """Mean and covariance as a textbook has them (Bishop 2006, equations 2.81 and 2.82), and the marginal of time."""
    scene, leaves, view_times = moving_scene(points=50, views=2, dtype=F64)
    means, times, left, motions, scales, opacities = leaves
    view_ids, point_ids = scene.all_rows()
    moment = cuda_ext.condition(*leaves, view_times, view_ids, point_ids)
    turn = rotations_4d(left, product(left, motions))
    assert_close(turn @ turn.mT, torch.eye(4, dtype=F64).expand(50, 4, 4), rtol=0, atol=1e-12)
    assert_close(torch.linalg.det(turn), torch.ones(50, dtype=F64), rtol=1e-12, atol=0)
    covariance = (turn * scales[:, None].square() @ turn.mT)[point_ids.long()]
    later = (view_times[view_ids.long()] - times[point_ids.long()])[:, None]
    of_time, across = covariance[:, 0, :1], covariance[:, 1:, 0]
    assert_close(moment.means, means[point_ids.long()] + across / of_time * later)
    expected = covariance[:, 1:, 1:] - across[:, :, None] * across[:, None] / of_time[:, :, None]
    assert_close(moment.axes @ moment.axes.mT, expected, rtol=1e-8, atol=1e-12)
    presence = torch.exp(-0.5 * later[:, 0].square() / of_time[:, 0])
    assert_close(moment.opacities, opacities[point_ids.long()] * presence)
    assert (moment.means - means[point_ids.long()]).norm(dim=-1).mean() > 0.05  # they move


def test_points_that_stand_still_are_3d_gaussians(either: str) -> None:
    scene, leaves, view_times = moving_scene(views=2, dtype=F64)
    leaves[1] = torch.full_like(leaves[1], 0.5)
    leaves[3] = torch.zeros_like(leaves[3])
    leaves[3][:, 0] = -2  # no motion, at whatever length
    leaves[4] = torch.cat([torch.full_like(leaves[4][:, :1], 1e6), leaves[4][:, 1:]], dim=-1)  # always there
    rows = scene.all_rows()
    moment = cuda_ext.condition(*leaves, view_times, *rows)
    got = drawn(scene, rows[0], True, *moment, scene.viewmats)
    expected = scene.project(*rows, antialiased=True)
    assert (expected.radii > 0).any()
    for mine, theirs in zip(got, expected, strict=True):
        assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("lenses", [False, True])
@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (F64, 1e-11)])
def test_project_axes_equals_reference(dtype: torch.dtype, rtol: float, antialiased: bool, lenses: bool) -> None:
    scene, points, view_times = moving_scene(views=3, dtype=dtype, lenses=lenses)
    rows = scene.all_rows()
    leaves = projected_rows(scene, points, view_times, rows)
    run = partial(drawn, scene, rows[0], antialiased)
    out, gradients = with_gradients(run, leaves)
    with cuda_ext.use_reference():
        expected, expected_gradients = with_gradients(run, leaves)
    assert 0.1 < (expected[4][:, 0] > 0).float().mean() < 0.9
    for got, want in zip(out[:4], expected[:4], strict=True):
        assert_close(got, want, rtol=rtol, atol=rtol * 0.1)
    assert (out[4] - expected[4]).abs().max() <= (1 if dtype == torch.float32 else 0)
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert want.norm() > 0 and (got - want).norm() <= rtol * want.norm()
        assert torch.equal(got == 0, want == 0)


@pytest.mark.parametrize("antialiased", [False, True])
def test_project_axes_gradcheck(either: str, antialiased: bool) -> None:
    scene, points, view_times = moving_scene(points=8, views=2, seed=3, dtype=F64)
    with torch.no_grad():
        points[5].clamp_(0.3, 0.9)
        points[1].fill_(0.5)
    rows = scene.all_rows()
    leaves = projected_rows(scene, points, view_times, rows)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return drawn(scene, rows[0], antialiased, *inputs)[:4]

    assert torch.autograd.gradcheck(run, leaves, eps=1e-7, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    scene, leaves, view_times = moving_scene(points=20, views=2)
    parts = projected_rows(scene, leaves, view_times, scene.all_rows())
    view_times, view_ids, point_ids = (x.to(device) for x in (view_times, *scene.all_rows()))
    leaves, parts = ([x.detach().to(device).requires_grad_() for x in tensors] for tensors in (leaves, parts))
    conditioned(view_times, (view_ids, point_ids), *leaves)  # compiles and loads the operators
    torch.library.opcheck(OPS.condition, (*leaves, view_times, view_ids, point_ids))
    there = scene.on(device)
    torch.library.opcheck(OPS.project_axes, (*parts, there.Ks, there.sizes, view_ids, 0.3, 0.01, 1e10, True))


@pytest.mark.parametrize(("points", "views"), [(0, 1), (4, 0)])
def test_nothing_to_do(either: str, points: int, views: int) -> None:
    scene, leaves, view_times = moving_scene(points=max(points, 1), views=max(views, 1))
    leaves = [leaf[:points] for leaf in leaves]
    rows = (torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    moment = cuda_ext.condition(*leaves, view_times[:views], *rows)
    assert [tuple(part.shape) for part in moment] == [(0, 3), (0, 3, 3), (0,)]
    found = drawn(scene, rows[0], False, *moment, scene.viewmats)
    assert found.means2d.shape == (0, 2)
    sum(part.sum() for part in (*moment, found.means2d)).backward()  # type: ignore[union-attr]
