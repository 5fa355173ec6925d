"""`sh_colors`: the native operator, the reference and gsplat's pure-torch function against one another."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cuda_ext
from tests.cuda_ext.scenes import Scene, one_point, random_scene
from tests.lib.threads import same_on_threads

OPS = torch.ops.ns_multigpu


def arguments(scene: Scene) -> list[Tensor]:
    """Return the differentiable arguments, as leaves."""
    tensors = (scene.means, scene.camera_centers, scene.sh_dc, scene.sh_rest)
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def with_gradients(degree: int, scene: Scene, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the colours, and the arguments' gradients for fixed random gradients of the colours."""
    inputs = arguments(scene)
    colors = cuda_ext.sh_colors(degree, *inputs, *rows)
    given = torch.randn(colors.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    gradients = torch.autograd.grad(colors, inputs, given.to(colors.dtype), allow_unused=True, materialize_grads=True)
    return colors, gradients


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_native_equals_reference(degree: int, dtype: torch.dtype, rtol: float) -> None:
    scene = random_scene(views=3, dtype=dtype)
    rows = scene.all_rows()
    colors, gradients = with_gradients(degree, scene, rows)
    with cuda_ext.use_reference():
        expected, expected_gradients = with_gradients(degree, scene, rows)
    assert 0.05 < (expected == 0).float().mean() < 0.8  # black clamps some
    assert_close(colors, expected, rtol=rtol, atol=rtol)
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert (got - want).norm() <= rtol * want.norm()
    used = (degree + 1) ** 2 - 1
    assert (gradients[3][:, used:] == 0).all() and gradients[3][:, :used].count_nonzero() >= 0.5 * used * 900
    assert (gradients[0].norm() > 0) == (gradients[1].norm() > 0) == (degree > 0)


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_gradcheck(either: str, degree: int) -> None:
    scene = random_scene(points=6, views=2, dtype=torch.float64)
    rows = scene.all_rows()

    def run(*inputs: Tensor) -> Tensor:
        return cuda_ext.sh_colors(degree, *inputs, *rows)

    assert torch.autograd.gradcheck(run, arguments(scene), eps=1e-7, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_equals_gsplat(either: str, degree: int) -> None:
    torch_impl = pytest.importorskip("gsplat.cuda._torch_impl", reason="gsplat is not installed")
    scene = random_scene(views=2, dtype=torch.float64)
    view_ids, point_ids = scene.all_rows()
    colors = cuda_ext.sh_colors(degree, *arguments(scene), view_ids, point_ids)
    way = scene.means[point_ids.long()] - scene.camera_centers[view_ids.long()]
    coefficients = torch.cat([scene.sh_dc[:, None], scene.sh_rest], 1)[point_ids.long()]
    theirs = torch_impl._spherical_harmonics(degree, way, coefficients)
    assert_close(colors, (theirs + 0.5).clamp_min(0), rtol=1e-9, atol=1e-9)


def test_fewer_bases_than_degree_three(either: str) -> None:
    """R may be just what the degree needs, and the colours are the same as with zeros behind."""
    scene = random_scene(rest_bases=3)
    rows = scene.all_rows()
    colors, gradients = with_gradients(1, scene, rows)
    scene.sh_rest = torch.nn.functional.pad(scene.sh_rest, (0, 0, 0, 12))
    assert_close(colors, with_gradients(3, scene, rows)[0], rtol=1e-6, atol=1e-6)
    assert list(gradients[3].shape) == [300, 3, 3]


def test_point_at_the_camera(either: str) -> None:
    """No direction: no NaN, and no gradient for the position."""
    scene = one_point(means=[[0.0, 0.0, 0.0]])
    row = torch.zeros(1, dtype=torch.int32)
    colors, gradients = with_gradients(3, scene, (row, row))
    assert torch.isfinite(colors).all() and all(torch.isfinite(g).all() for g in gradients)
    assert (gradients[0] == 0).all() and (gradients[2] != 0).all()


@pytest.mark.parametrize(("points", "views"), [(0, 2), (5, 0), (0, 0), (5, 2)])
def test_no_rows(either: str, points: int, views: int) -> None:
    scene = random_scene(points=points, views=views)
    none = torch.empty(0, dtype=torch.int32)
    colors, gradients = with_gradients(3, scene, (none, none))
    assert list(colors.shape) == [0, 3]
    assert [g.shape for g in gradients] == [a.shape for a in arguments(scene)]
    assert all((g == 0).all() for g in gradients)


@pytest.mark.usefixtures("native")
def test_same_bits_on_any_number_of_threads() -> None:
    scene = random_scene(points=5000)

    def run() -> list[Tensor]:
        colors, gradients = with_gradients(3, scene, scene.all_rows())
        return [colors, *gradients]

    same_on_threads(run)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("degree", [0, 3])
def test_opcheck(degree: int) -> None:
    scene = random_scene(points=10, dtype=torch.float64)
    rows = scene.all_rows()
    inputs = arguments(scene)
    torch.library.opcheck(OPS.sh_colors, (degree, *inputs, *rows))
    plain = [tensor.detach() for tensor in inputs]
    colors = OPS.sh_colors(degree, *plain, *rows)
    torch.library.opcheck(OPS.sh_colors_backward, (degree, *plain, *rows, colors, torch.randn_like(colors)))


def test_wrong_arguments_are_named(either: str) -> None:
    scene = random_scene(points=10, rest_bases=8)
    rows = scene.all_rows()
    with pytest.raises(ValueError, match="degree must be 0, 1, 2 or 3, not 4"):
        cuda_ext.sh_colors(4, *arguments(scene), *rows)
    with pytest.raises(ValueError, match="at least 15 bases for degree 3, not 8"):
        cuda_ext.sh_colors(3, *arguments(scene), *rows)
