"""`cull`, `project` and `sh_colors` on CUDA: our kernels against the CPU twins and the fp64 reference."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cuda_ext
from tests.cuda_ext.graphs import OUR_KERNELS, check_replays
from tests.cuda_ext.projections import PROJECT_INPUTS, projected, weights
from tests.cuda_ext.scenes import Scene, one_point, pad, random_scene

pytestmark = OUR_KERNELS
SH_INPUTS = ("means", "camera_centers", "sh_dc", "sh_rest")
MANY = 70  # views: more than fit into the arguments of one launch
OPS = torch.ops.ns_multigpu


def colored(scene: Scene, rows: tuple[Tensor, Tensor], degree: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output of `sh_colors` and the gradients of its inputs."""
    leaves = [getattr(scene, name).detach().clone().requires_grad_() for name in SH_INPUTS]
    out = cuda_ext.sh_colors(degree, *leaves, *rows)
    gradients = torch.autograd.grad([out], leaves, weights([out]), allow_unused=True, materialize_grads=True)
    return [out], list(gradients)


def close(name: str, value: Tensor, expected: Tensor, relative: float) -> None:
    """Relative error of the whole tensor, direction and zeros: element-wise bounds alone would hide a missing term."""
    value, expected = value.double().cpu(), expected.double().cpu()
    assert torch.isfinite(value).all(), name
    error = float((value - expected).norm() / expected.norm().clamp_min(1e-30))
    cosine = float(torch.nn.functional.cosine_similarity(value.flatten(), expected.flatten(), dim=0))
    assert error < relative and cosine > 1 - relative, f"{name}: relative error {error:.2e}, cosine {cosine:.8f}"
    assert (expected != 0).any(), name


def ids(rows: tuple[Tensor, Tensor]) -> set[tuple[int, int]]:
    return set(zip(rows[0].tolist(), rows[1].tolist(), strict=True))


@pytest.mark.parametrize(("points", "views"), [(1, 1), (31, 2), (1023, 1), (1025, 3), (40_000, 2), (300, MANY)])
def test_cull(points: int, views: int) -> None:
    scene = random_scene(points, views, seed=points)
    rects = [n for w, h in zip(scene.sizes[::2], scene.sizes[1::2], strict=True) for n in (5, 3, w // 2, h - 7)]
    if views > 1:
        rects[:4] = (10, 10, 10, 30)  # sees nothing
    for given in (scene.whole, rects):
        found = scene.on("cuda").cull(given)
        assert all(t.dtype == torch.int32 for t in found)
        keys = found[0].long() * points + found[1].long()
        assert (keys[1:] > keys[:-1]).all()  # sorted by (view, point), each once
        expected = scene.cull(given)
        # A point exactly at the bound may fall to either side.
        assert len(ids(found) ^ ids(expected)) <= 1e-3 * len(expected[0])
    assert not (ids(found) and views > 1 and min(found[0].tolist()) == 0)


def test_cull_keeps_all_that_can_be_seen() -> None:
    scene = random_scene(5000, 2, seed=1, dtype=torch.float64)
    kept = ids(scene.to(torch.float32).on("cuda").cull())
    rows = scene.all_rows()
    with cuda_ext.use_reference():
        radii = scene.project(*rows).radii
    alive = radii[:, 0] > 0
    assert alive.sum() > 1000 and (radii < 0).any() and len(kept) < len(rows[0])
    seen = radii[:, 0] != 0
    assert ids((rows[0][seen], rows[1][seen])) <= kept


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize(("points", "views"), [(40, 1), (1300, 1), (1300, 3), (100, MANY)])
def test_project(points: int, views: int, antialiased: bool) -> None:
    scene = random_scene(points, views, seed=2)
    rows = scene.all_rows()  # with the dead ones, and every point in each view
    out, gradients = projected(scene.on("cuda"), (rows[0].cuda(), rows[1].cuda()), antialiased)
    with cuda_ext.use_reference():
        expected, expected_gradients = projected(scene.to(torch.float64), rows, antialiased)
    radii, wanted = out[4].cpu(), expected[4]
    agree = (radii.sign() == wanted.sign()).all(-1)
    assert agree.float().mean() > 0.999 and 0.2 < (wanted[:, 0] > 0).float().mean() < 0.9
    assert (radii[agree] - wanted[agree]).abs().max() <= 1
    for got, want in zip(out[:4], expected[:4], strict=True):
        assert_close(got.cpu()[agree].double(), want[agree], rtol=1e-4, atol=1e-5)
        assert (got[out[4][:, 0] <= 0] == 0).all()
    if agree.all():
        for name, got, want in zip(PROJECT_INPUTS, gradients, expected_gradients, strict=True):
            close(name, got, want, 1e-3)
            assert (got.cpu() == 0)[want == 0].all(), name
    twin, twin_gradients = projected(scene, rows, antialiased)
    assert torch.equal(radii > 0, twin[4] > 0)
    for name, got, want in zip(PROJECT_INPUTS, gradients, twin_gradients, strict=True):
        close(name, got, want, 1e-3)


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize(("degree", "bases"), [(0, 0), (0, 15), (1, 3), (1, 15), (2, 8), (2, 15), (3, 15), (3, 17)])
def test_sh_colors(degree: int, bases: int, views: int) -> None:
    scene = random_scene(700, views, seed=4, rest_bases=bases)
    rows = scene.cull()
    with cuda_ext.use_reference():
        expected, expected_gradients = colored(scene.to(torch.float64), rows, degree)
    out, gradients = colored(scene.on("cuda"), (rows[0].cuda(), rows[1].cuda()), degree)
    assert_close(out[0].cpu().double(), expected[0], rtol=1e-4, atol=1e-5)
    assert 0.05 < (expected[0] == 0).double().mean() < 0.9  # black clamps some
    for name, got, want in zip(SH_INPUTS, gradients, expected_gradients, strict=True):
        assert got.shape == want.shape
        if (want != 0).any():
            close(name, got, want, 1e-3)
        assert (got.cpu() == 0)[want == 0].all(), name
    assert (gradients[3][:, (degree + 1) ** 2 - 1 :] == 0).all()


def test_point_in_the_camera_has_no_direction() -> None:
    scene = one_point(torch.float32, means=[[0.0, 0.0, 0.0]])
    rows = scene.all_rows()
    out, gradients = colored(scene.on("cuda"), (rows[0].cuda(), rows[1].cuda()), 3)
    expected, expected_gradients = colored(scene, rows, 3)
    for got, want in zip((*out, *gradients), (*expected, *expected_gradients), strict=True):
        assert_close(got.cpu(), want)


@pytest.mark.parametrize("views", [1, 2, MANY])
def test_padding_is_dead(views: int) -> None:
    scene = random_scene(600, views).on("cuda")
    rows = scene.cull()
    keep = len(rows[0])
    for run in (lambda r: projected(scene, r, True), lambda r: colored(scene, r, 3)):
        out, _ = run(rows)
        padded, padded_gradients = run(pad(rows, views, 333))
        for whole, part in zip(padded, out, strict=True):
            assert torch.equal(whole[:keep], part) and (whole[keep:] == 0).all()
        # The weights differ with the number of rows, so the gradients are compared with those of the CPU twin.
        host = scene.on("cpu")
        host_rows = tuple(r.cpu() for r in pad(rows, views, 333))
        twin = projected(host, host_rows, True) if run(rows)[0][0].shape[1] == 2 else colored(host, host_rows, 3)
        for got, want in zip(padded_gradients, twin[1], strict=True):
            close("padded", got, want, 1e-3)


def test_same_bits_every_time() -> None:
    scene = random_scene(20_000, 2).on("cuda")
    results = []
    for _ in range(3):
        rows = scene.cull()
        parts = (*projected(scene, rows, True), *colored(scene, rows, 3))
        results.append([*rows, *(t for part in parts for t in part)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("points", "views"), [(0, 2), (7, 0), (0, 0)])
def test_nothing(points: int, views: int) -> None:
    scene = random_scene(points, views).on("cuda")
    none = scene.cull()
    assert len(none[0]) == len(none[1]) == 0
    for rows in (none, pad(none, views, 5)):
        out, gradients = projected(scene, rows, False)
        colors, color_gradients = colored(scene, rows, 2)
        for t in (*out, *gradients, *colors, *color_gradients):
            assert (t == 0).all()


def test_views_into_larger_buffers() -> None:
    """Tensors that are not contiguous, and quaternions that do not start at 16 bytes."""
    scene = random_scene(500).on("cuda")
    rows = scene.cull()
    expected, expected_gradients = projected(scene, rows, False)
    buffer = torch.empty(4 * 500 + 1, device="cuda")
    buffer[1:] = scene.quats.flatten()
    scene.quats = buffer[1:].view(500, 4)
    scene.scales = scene.scales.T.contiguous().T
    assert scene.quats.data_ptr() % 16 == 4 and not scene.scales.is_contiguous()
    out = scene.project(*rows)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    arguments = (scene.means, scene.quats, scene.scales, scene.opacities, scene.viewmats, scene.Ks, scene.sizes, *rows)
    given = [w.T.contiguous().T if w.dim() == 2 else w for w in weights(expected[:4])]
    got = OPS.project_backward(*arguments, 0.3, 0.01, 1e10, False, expected[1], expected[4], *given)
    assert all(torch.equal(a, b) for a, b in zip(got, expected_gradients, strict=True))


def test_wrong_types_are_named() -> None:
    scene = random_scene(10, dtype=torch.float64).on("cuda")
    with pytest.raises(TypeError, match=r"on CUDA it must be Float.*float32"):
        scene.cull()
    scene = scene.to(torch.float32)
    scene.Ks = scene.Ks.cpu()
    with pytest.raises(TypeError, match=r"Ks is torch\.float32 on cpu"):
        scene.cull()


@pytest.mark.parametrize("views", [2, MANY])
def test_in_a_cuda_graph(views: int) -> None:
    """Capture on one scene, replay on another: the graph holds sizes, and reads everything else again."""
    scene, other = random_scene(1000, views, seed=8).on("cuda"), random_scene(1000, views, seed=9).on("cuda")
    names = ("means", "quats", "scales", "opacities", "sh_dc", "sh_rest", "viewmats", "Ks")
    centers = torch.empty(views, 3, device="cuda")
    culled = [one.cull() for one in (scene, other)]
    assert all(0 < len(view_ids) <= 800 * views for view_ids, _ in culled)
    rows, others = (pad(found, views, 800 * views - len(found[0])) for found in culled)

    def run() -> list[Tensor]:
        points = (scene.means, scene.quats, scene.scales, scene.opacities, scene.viewmats, scene.Ks, scene.sizes, *rows)
        settings = (0.3, 0.01, 1e10, True)
        out = OPS.project(*points, *settings)
        grads = OPS.project_backward(*points, *settings, out[1], out[4], *out[:4])
        sh = (3, scene.means, centers, scene.sh_dc, scene.sh_rest, *rows)
        colors = OPS.sh_colors(*sh)
        return [*out, *grads, colors, *OPS.sh_colors_backward(*sh, colors, colors)]

    def change(_: float) -> None:
        for name in names:
            getattr(scene, name).copy_(getattr(other, name))
        centers.copy_(other.camera_centers)
        for ids, new in zip(rows, others, strict=True):
            ids.copy_(new)

    centers.copy_(scene.camera_centers)
    replayed = check_replays(run, change)
    assert int((replayed[4][:, 0] > 0).sum()) > 100 * views  # drawn
