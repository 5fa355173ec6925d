"""The CUDA kernels of 2D Gaussians and convexes, run on a CPU (`emulated`), against the reference in float64."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext.ops.raster.primitives import box_lists
from cuda_ext.reference import convexes, surfels
from tests.cuda_ext import convex_scene, surfel_scene
from tests.cuda_ext.emulated import PRIMITIVES, compiled, draw_primitives, project_primitives
from tests.cuda_ext.splats import assert_close_but_few, assert_gradient_close
from tests.cuda_ext.surface_scene import HEIGHT, WIDTH

CHUNK = 256
SCENES: dict[str, tuple[Any, Any]] = {
    "surfels": (surfel_scene, surfels.rasterize_surfels),
    "convexes": (convex_scene, convexes.rasterize_convexes),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("emulated"), PRIMITIVES, "primitives.cpp")


def rows_of(name: str, count: int, patches: list[int], faint: bool) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Columns of rows as `rasterize_<name>` takes them, leaves of autograd, and their lists."""
    scene_of, _ = SCENES[name]
    scene = scene_of.make_scene(count, grad=False, spread=1.2)
    if faint:  # so that lists are walked to their ends
        scene = scene._replace(opacities=scene.opacities * 0.03 + 0.004)
    with cuda_ext.use_reference():
        rows = scene_of.project(scene)
        lists = box_lists(rows, scene.view_ids, patches)
    columns = [*rows[:3], rows.row_opacities, scene.colors, rows.depths]
    return [column.clone().requires_grad_() for column in columns], lists


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(
    ("count", "faint", "patches"),
    [
        (40, False, [0, 0, 0, 41, 37, 1, 0, 0, 41, 37]),
        (500, False, [1, 7, 5, 30, 29, 0, 0, 0, 9, 3]),  # pixels that close
        (700, True, [1, 10, 9, 28, 24]),  # several chunks
    ],
)
def test_pixels_and_gradients_are_the_references(
    library: ctypes.CDLL, name: str, count: int, faint: bool, patches: list[int]
) -> None:
    columns, lists = rows_of(name, count, patches, faint)
    if faint:
        assert int(lists[0].diff().max()) > CHUNK
    out, extra, alpha, last = SCENES[name][1](*columns, *lists, patches, 16)
    generator = torch.Generator().manual_seed(1)
    v_pixels = tuple(torch.randn(x.shape, generator=generator).double() for x in (out, extra, alpha))
    same = draw_primitives(library, name, columns, lists, patches, v_pixels)[0][3] == last
    assert float((~same).double().mean()) <= 4e-3
    v_pixels = tuple(v * same.view(-1, *[1] * (v.dim() - 1)) for v in v_pixels)
    drawn, found = draw_primitives(library, name, columns, lists, patches, v_pixels)
    for one, other in zip(drawn[:3], (out, extra, alpha), strict=True):
        assert_close_but_few(one.double(), other.detach(), 2e-4, 2e-4, 4e-3)
    loss = sum((x * v).sum() for x, v in zip((out, extra, alpha.abs()), v_pixels, strict=True))
    expected = torch.autograd.grad(loss, columns)
    for one, other in zip(found, expected, strict=True):
        assert bool(one.isfinite().all())
        assert_gradient_close(one, other, 1e-3)
    if faint:
        assert int(last.max()) - int(lists[0][:-1][lists[0].diff().argmax()]) > CHUNK, "no checkpoint was read"


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(
    ("count", "views", "lenses"), [(600, 2, False), (9, 66, False), (70, 3, True)]
)  # several groups of points; more views than a launch's
def test_rows_and_their_gradients_are_the_references(
    library: ctypes.CDLL, name: str, count: int, views: int, lenses: bool
) -> None:
    scene_of = SCENES[name][0]
    scene = scene_of.make_scene(count, views, spread=1.2, lenses=lenses)
    with cuda_ext.use_reference():
        *rows, radii = scene_of.project(scene)
    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(x.shape, generator=generator).double() for x in rows]
    sizes = [WIDTH, HEIGHT] * views
    padding = torch.tensor([views - 1] * 3).int(), torch.full((3,), -1).int()
    ids = tuple(torch.cat(pair) for pair in zip((scene.view_ids, scene.point_ids), padding, strict=True))
    columns = list(scene[:-5])
    padded = [torch.cat([x, torch.ones(3, *x.shape[1:]).double()]) for x in given]
    (*projected, extents), found = project_primitives(
        library, name, columns, scene.viewmats, scene.Ks, sizes, ids, 0.2, padded
    )  # fmt: skip
    assert float(((extents[:-3] - radii).abs() > 1).double().mean()) <= 4e-3
    assert all(bool((x[-3:] == 0).all()) for x in (*projected, extents))
    same = (extents[:-3] > 0) == (radii > 0)
    assert bool(same.all()), "a row on the edge: choose other seeds"
    for one, other in zip(projected, rows, strict=True):
        assert_close_but_few(one[:-3].double(), other.detach(), 2e-3, 2e-3, 4e-3)
    loss = sum((x * v).sum() for x, v in zip(rows, given, strict=True))
    expected = torch.autograd.grad(loss, [*columns, scene.viewmats], allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert bool(one.isfinite().all())
        assert_gradient_close(one, other, 5e-3)
