"""`condition` and `project_axes` on CUDA: our kernels against the CPU twins and the fp64 reference."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cuda_ext
from tests.cuda_ext.graphs import OUR_KERNELS, check_replays
from tests.cuda_ext.moments import MOVING, moving, moving_scene, projected_rows, with_gradients
from tests.cuda_ext.project.test_conditioning import conditioned, drawn
from tests.cuda_ext.project.test_cuda_projection import close
from tests.cuda_ext.scenes import Scene, lens_scene, random_scene

pytestmark = OUR_KERNELS
MANY = 70  # views: more than fit into the arguments of one launch
OPS = torch.ops.ns_multigpu


def on_gpu(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().cuda().requires_grad_() for tensor in tensors]


def cuda_rows(scene: Scene) -> tuple[Tensor, Tensor]:
    view_ids, point_ids = scene.all_rows()
    return view_ids.cuda(), point_ids.cuda()


@pytest.mark.parametrize(("points", "views"), [(1, 1), (255, 2), (1300, 3), (100, MANY)])
def test_condition(points: int, views: int) -> None:
    scene = random_scene(points, views, seed=points)
    leaves, view_times = moving(scene)
    out, gradients = with_gradients(partial(conditioned, view_times.cuda(), cuda_rows(scene)), on_gpu(leaves))
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with cuda_ext.use_reference():
        run = partial(conditioned, view_times.double(), scene.all_rows())
        expected, expected_gradients = with_gradients(run, double)
    for got, want in zip(out, expected, strict=True):
        assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4)
    for name, got, want in zip(MOVING, gradients, expected_gradients, strict=True):
        close(name, got, want, 1e-3)


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize(
    ("points", "views", "lenses"), [(40, 1, False), (1300, 3, False), (100, MANY, False), (1300, 3, True)]
)
def test_project_axes(points: int, views: int, lenses: bool, antialiased: bool) -> None:
    scene = (lens_scene if lenses else random_scene)(points, views, seed=2)
    moving_points, view_times = moving(scene)
    leaves = projected_rows(scene, moving_points, view_times, scene.all_rows())
    run = partial(drawn, scene.on("cuda"), cuda_rows(scene)[0], antialiased)
    out, gradients = with_gradients(run, on_gpu(leaves))
    expected, expected_gradients = with_gradients(partial(drawn, scene, scene.all_rows()[0], antialiased), leaves)
    radii, wanted = out[4].cpu(), expected[4]
    agree = (radii.sign() == wanted.sign()).all(-1)
    assert agree.float().mean() > 0.999 and (wanted[:, 0] > 0).any()
    assert (radii[agree] - wanted[agree]).abs().max() <= 1
    for got, want in zip(out[:4], expected[:4], strict=True):
        assert_close(got.cpu()[agree], want[agree], rtol=1e-4, atol=1e-4)
    if agree.all():
        for name, got, want in zip(
            ("means", "axes", "opacities", "viewmats"), gradients, expected_gradients, strict=True
        ):
            close(name, got, want, 1e-3)


def test_padding_and_nothing() -> None:
    _, leaves, view_times = moving_scene(points=5, views=1)
    rows = (torch.tensor([0, 0, 0], dtype=torch.int32).cuda(), torch.tensor([1, 4, -1], dtype=torch.int32).cuda())
    inputs = on_gpu(leaves)
    moment = cuda_ext.condition(*inputs, view_times.cuda(), *rows)
    assert all((part[2] == 0).all() and (part[:2] != 0).any() for part in moment)
    sum(part.sum() for part in moment).backward()  # type: ignore[union-attr]
    assert inputs[5].grad is not None and (inputs[5].grad != 0).tolist() == [False, True, False, False, True]
    none = tuple(row[:0] for row in rows)
    assert cuda_ext.condition(*inputs, view_times.cuda(), *none).means.shape == (0, 3)


def test_they_can_be_captured_and_repeat_their_bits() -> None:
    scene, leaves, view_times = moving_scene(points=700, views=2)
    rows, inputs = cuda_rows(scene), on_gpu(leaves)
    there = scene.on("cuda")

    def both() -> tuple[Tensor, ...]:
        moment = OPS.condition(*[leaf.detach() for leaf in inputs], view_times_there, *rows)
        return OPS.project_axes(*moment, there.viewmats, there.Ks, there.sizes, rows[0], 0.3, 0.01, 1e10, True)

    view_times_there = view_times.cuda()
    check_replays(both)
    first, second = (with_gradients(partial(conditioned, view_times_there, rows), on_gpu(leaves))[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
