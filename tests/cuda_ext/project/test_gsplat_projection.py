"""`cull`, `project` and `sh_colors` through gsplat: on CUDA the kernels themselves; on CPU what we do around them, with
gsplat's pure-torch functions standing in for its kernels behind the kernels' own signatures."""

import fcntl
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cuda_ext
from cuda_ext.dispatch import gsplat_kernels as _gsplat
from cuda_ext.gsplat import projection as gsplat_projection
from tests.cuda_ext.scenes import Scene, random_scene

torch_impl = pytest.importorskip("gsplat.cuda._torch_impl", reason="gsplat is not installed")
SETTINGS = (0.3, 0.01, 1e10)


def fused_projection(
    means: Tensor, quats: Tensor, scales: Tensor, viewmats: Tensor, Ks: Tensor, size: tuple[int, int],
    limits: tuple[float, float, float], compensate: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    covariances, _ = torch_impl._quat_scale_to_covar_preci(quats, scales, True, False)
    return torch_impl._fully_fused_projection(
        means, covariances, viewmats, Ks, *size, *limits, calc_compensations=compensate
    )


def stand_in() -> SimpleNamespace:
    """Return the kernels that `gsplat_projection` calls, with the argument lists of gsplat 1.4.0's bindings."""

    def fwd(means, covars, quats, scales, viewmats, Ks, width, height, eps2d, near, far, clip, compensate, camera):  # type: ignore[no-untyped-def]
        assert covars is None and clip == 0.0 and camera == "pinhole" and all(x.is_contiguous() for x in (viewmats, Ks))
        limits, size = (eps2d, near, far), (width, height)
        return fused_projection(means, quats, scales, viewmats, Ks, size, limits, compensate)

    def bwd(means, covars, quats, scales, viewmats, Ks, width, height, eps2d, camera, radii, conics, compensations,  # type: ignore[no-untyped-def]
            v_means2d, v_depths, v_conics, v_compensations, viewmats_requires_grad):  # fmt: skip
        assert covars is None and camera == "pinhole" and viewmats_requires_grad
        assert (compensations is None) == (v_compensations is None)
        inputs = [x.detach().clone().requires_grad_() for x in (means, quats, scales, viewmats)]
        with torch.enable_grad():
            limits = (eps2d, 0.01, 1e10)
            out = fused_projection(*inputs, Ks, (width, height), limits, compensations is not None)
            alive, given = radii > 0, {1: v_means2d, 2: v_depths, 3: v_conics}
            if compensations is not None:
                assert_close(compensations, out[4])
                given[4] = v_compensations
            assert_close(conics[alive], out[3][alive], rtol=1e-4, atol=1e-5)
            outputs = [out[i][alive] for i in given]
        grads = torch.autograd.grad(outputs, inputs, [v[alive] for v in given.values()])
        return grads[0], None, *grads[1:]

    def sh_bwd(bases, degree, dirs, coefficients, masks, v_colors, compute_v_dirs):  # type: ignore[no-untyped-def]
        assert masks is None and compute_v_dirs and coefficients.shape[1] == bases
        inputs = [x.detach().clone().requires_grad_() for x in (dirs, coefficients)]
        with torch.enable_grad():
            colors = torch_impl._spherical_harmonics(degree, *inputs)
        grads = torch.autograd.grad(colors, inputs, v_colors, allow_unused=True, materialize_grads=True)
        return grads[1], grads[0]

    return SimpleNamespace(
        fully_fused_projection_fwd=fwd,
        fully_fused_projection_bwd=bwd,
        compute_sh_fwd=lambda degree, dirs, coeffs, masks: torch_impl._spherical_harmonics(degree, dirs, coeffs),
        compute_sh_bwd=sh_bwd,
        CameraModelType=SimpleNamespace(PINHOLE="pinhole"),
    )


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gsplat_projection, "gsplat_kernels", stand_in)


def assert_project_agrees(
    scene: Scene, project: Callable[..., tuple[Tensor, ...]], backward: Callable[..., tuple[Tensor, ...]],
    antialiased: bool,
) -> None:  # fmt: skip
    """Compare with the reference on every row, but for those that only gsplat's 3-sigma square drops."""
    view_ids, point_ids = scene.all_rows()
    inputs = [x.clone().requires_grad_() for x in (scene.means, scene.quats, scene.scales, scene.opacities)]
    viewmats = scene.viewmats.clone().requires_grad_()
    arguments = (*inputs, viewmats, scene.Ks, scene.sizes, view_ids, point_ids, *SETTINGS, antialiased)
    with cuda_ext.use_reference():
        expected = cuda_ext.project(*arguments)
    with torch.no_grad():
        out = project(*arguments)
    alive = out[4][:, 0] > 0
    assert alive.sum() > 100 and torch.equal(out[4].sign(), expected.radii.sign())
    for got, want in zip(out[:4], expected[:4], strict=True):
        # Not 1e-4: gsplat's determinant is a difference of products, which costs thin splats some digits.
        assert_close(got[alive], want.detach()[alive], rtol=2e-3, atol=1e-4)
        assert (got[~alive] == 0).all()
    assert (out[4] - expected.radii)[alive].abs().max() <= 1
    given = [torch.randn_like(o) for o in out[:4]]
    masked = [torch.where(alive.view(-1, *[1] * (v.dim() - 1)), v, 0.0) for v in given]
    wanted = torch.autograd.grad(expected[:4], [*inputs, viewmats], masked)
    with torch.no_grad():
        gradients = backward(*arguments, out[1], out[4], *given)
    for got, want in zip(gradients, wanted, strict=True):
        assert (got - want).norm() <= 1e-3 * want.norm()


def assert_sh_agrees(scene: Scene, forward: Callable[..., Tensor], backward: Callable[..., tuple[Tensor, ...]]) -> None:
    rows = scene.all_rows()
    for degree in range(4):
        tensors = (scene.means, scene.camera_centers, scene.sh_dc, scene.sh_rest)
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        with cuda_ext.use_reference():
            expected = cuda_ext.sh_colors(degree, *inputs, *rows)
        given = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, inputs, given, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            colors = forward(degree, *inputs, *rows)
            gradients = backward(degree, *inputs, *rows, colors, given)
        assert_close(colors, expected.detach(), rtol=1e-4, atol=1e-5)
        for got, want in zip(gradients, wanted, strict=True):
            assert (got - want).norm() <= 1e-3 * want.norm()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("antialiased", [False, True])
def test_project_around_the_kernels(views: int, antialiased: bool) -> None:
    scene = random_scene(views=views)
    functions = (gsplat_projection._project, gsplat_projection._project_backward)
    assert_project_agrees(scene, *functions, antialiased=antialiased)


@pytest.mark.usefixtures("kernels")
def test_sh_around_the_kernels() -> None:
    functions = (gsplat_projection._sh_colors, gsplat_projection._sh_colors_backward)
    assert_sh_agrees(random_scene(views=3), *functions)


@pytest.mark.usefixtures("kernels")
def test_views_without_rows() -> None:
    scene = random_scene(views=3)
    view_ids = torch.ones(300, dtype=torch.int32)  # all in the middle view
    points = (scene.means, scene.quats, scene.scales, scene.opacities)
    cameras = (scene.viewmats, scene.Ks, scene.sizes)
    ids = torch.arange(300, dtype=torch.int32)
    arguments = (*points, *cameras, view_ids, ids, *SETTINGS, False)
    out = gsplat_projection._project(*arguments)
    assert (out[4] > 0).any()
    v_viewmats = gsplat_projection._project_backward(*arguments, out[1], out[4], *out[:4])[4]
    assert [bool(v.any()) for v in v_viewmats] == [False, True, False]


def test_missing_kernels_error_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gsplat, "import_module", lambda name: SimpleNamespace(_C=None))
    with pytest.raises(cuda_ext.NativeBuildError, match="put `nvcc` on PATH"):
        _gsplat.gsplat_kernels()


def test_one_process_imports_the_kernels_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_gsplat, "cache_folder", lambda: tmp_path / "new")
    monkeypatch.delitem(sys.modules, "gsplat.cuda._backend", raising=False)

    def imported(_: str) -> SimpleNamespace:
        with open(tmp_path / "new" / "gsplat.lock", "w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return SimpleNamespace(_C="kernels")

    monkeypatch.setattr(_gsplat, "import_module", imported)
    assert _gsplat.gsplat_kernels() == "kernels"
    with open(tmp_path / "new" / "gsplat.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.usefixtures("kernels")
def test_only_float32() -> None:
    scene = random_scene(dtype=torch.float64)
    with pytest.raises(TypeError, match="float32, not torch"):
        gsplat_projection._sh_colors(
            0, scene.means, scene.camera_centers, scene.sh_dc, scene.sh_rest, *scene.all_rows()
        )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("views", [1, 3])
def test_padding_is_dead(views: int) -> None:
    scene = random_scene(views=views)
    view_ids, point_ids = scene.cull()
    rows, padding = len(view_ids), torch.full((7,), -1, dtype=torch.int32)
    points, cameras = (scene.means, scene.quats, scene.scales, scene.opacities), (scene.viewmats, scene.Ks, scene.sizes)
    harmonics = (2, scene.means, scene.camera_centers, scene.sh_dc, scene.sh_rest)
    results = []
    for ids in (
        (view_ids, point_ids),
        (torch.cat([view_ids, torch.full_like(padding, views - 1)]), torch.cat([point_ids, padding])),
    ):
        arguments = (*points, *cameras, *ids, *SETTINGS, True)
        out = gsplat_projection._project(*arguments)
        gradients = gsplat_projection._project_backward(*arguments, out[1], out[4], *(o + 1 for o in out[:4]))
        colors = gsplat_projection._sh_colors(*harmonics, *ids)
        gradients += gsplat_projection._sh_colors_backward(*harmonics, *ids, colors, colors + 1)
        results.append(((*out, colors), gradients))
    for whole, part in zip(results[1][0], results[0][0], strict=True):
        assert_close(whole[:rows], part)
        assert (whole[rows:] == 0).all() and (part != 0).any()
    for whole, part in zip(results[1][1], results[0][1], strict=True):
        assert_close(whole, part, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("antialiased", [False, True])
def test_project_on_cuda(antialiased: bool) -> None:
    functions = (gsplat_projection._project, gsplat_projection._project_backward)
    assert_project_agrees(random_scene(points=3000, views=3).on("cuda"), *functions, antialiased=antialiased)


@pytest.mark.gpu
def test_sh_on_cuda() -> None:
    functions = (gsplat_projection._sh_colors, gsplat_projection._sh_colors_backward)
    assert_sh_agrees(random_scene(points=3000, views=3).on("cuda"), *functions)
