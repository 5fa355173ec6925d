"""Padding behind rows, as `splat_forward` makes it: dead for `project` and `sh_colors`, on CPU and in the reference."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import cuda_ext
from tests.cuda_ext.scenes import Scene, pad, random_scene

INPUTS = ("means", "quats", "scales", "opacities", "viewmats", "sh_dc", "sh_rest")


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


@pytest.mark.parametrize("points", [0, 5])
def test_nothing_but_padding(either: str, points: int) -> None:
    scene = random_scene(points=points)
    nothing = torch.empty(0, dtype=torch.int32)
    out = scene.project(*pad((nothing, nothing), 2, 4))
    assert all(o.shape[0] == 4 and (o == 0).all() for o in out)


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("views", [1, 2])
def test_padding_is_dead(either: str, views: int, antialiased: bool) -> None:
    scene = random_scene(views=views, dtype=torch.float64)
    rows = scene.cull()
    keep = len(rows[0])
    padded = pad(rows, views, 33)
    out, gradients = outputs_and_gradients(scene, rows, keep, antialiased=antialiased)
    padded_out, padded_gradients = outputs_and_gradients(scene, padded, keep, antialiased=antialiased)
    for whole, part in zip(padded_out, out, strict=True):
        assert torch.equal(whole[:keep], part) and (part != 0).any() and (whole[keep:] == 0).all()
    for name, got, want in zip(INPUTS, padded_gradients, gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=name)
        assert (want != 0).any(), name


@pytest.mark.usefixtures("native")
def test_padding_at_another_place_is_refused() -> None:
    scene = random_scene(points=10)
    for views, points in (([0, 1], [-1, 3]), ([1, 1], [-1, 3]), ([0, 0], [3, -1])):
        ids = [torch.tensor(ids, dtype=torch.int32) for ids in (views, points)]
        with pytest.raises(IndexError, match="does not exist"):
            scene.project(ids[0], ids[1])
