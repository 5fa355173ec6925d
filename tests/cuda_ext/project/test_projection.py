"""`cull` and `project`: the native operators, the reference, and gsplat's pure-torch functions against one another."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cuda_ext
from tests.cuda_ext.projections import PROJECT_INPUTS as INPUTS
from tests.cuda_ext.projections import check_gradients, projected, weights
from tests.cuda_ext.scenes import lens_scene, one_point, random_scene
from tests.lib.threads import same_on_threads

OPS = torch.ops.ns_multigpu


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("lenses", [False, True])
@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.float64, 1e-11)])
def test_native_equals_reference(dtype: torch.dtype, rtol: float, antialiased: bool, lenses: bool) -> None:
    scene = (lens_scene if lenses else random_scene)(views=4, dtype=dtype)
    rows = scene.all_rows()  # with the dead ones, and every point in each view
    out, gradients = projected(scene, rows, antialiased)
    with cuda_ext.use_reference():
        expected, expected_gradients = projected(scene, rows, antialiased)
    alive = expected[4][:, 0] > 0
    assert 0.1 < alive.float().mean() < 0.9
    centres = torch.nn.functional.pad(scene.means, (0, 1), value=1.0)[rows[1].long(), :, None]
    behind = (scene.viewmats[rows[0].long()] @ centres)[:, 2, 0] < 0
    assert ((alive & behind).sum() > 10) == lenses, "a fisheye draws what lies beyond 90 degrees"
    for got, want in zip(out[:4], expected[:4], strict=True):
        assert_close(got, want, rtol=rtol, atol=rtol * 0.1)
        assert (want[alive] != 0).any() and (got[~alive] == 0).all()
    assert (out[4] - expected[4]).abs().max() <= (1 if dtype == torch.float32 else 0)
    assert torch.equal(out[4] == 0, expected[4] == 0)
    for name, got, want in zip(INPUTS, gradients, expected_gradients, strict=True):
        assert (got - want).norm() <= rtol * want.norm(), name
        assert torch.equal(got == 0, want == 0), name


@pytest.mark.parametrize("antialiased", [False, True])
def test_gradcheck(either: str, antialiased: bool) -> None:
    scene = random_scene(points=12, views=2, seed=3, dtype=torch.float64)
    scene.opacities = scene.opacities.clamp(0.2, 0.9)
    rows = scene.all_rows()
    radii = scene.project(*rows, antialiased=antialiased).radii
    assert (radii > 0).any() and (radii == 0).any()
    check_gradients(scene, rows, antialiased)


@pytest.mark.parametrize("antialiased", [False, True])
def test_equals_gsplat(either: str, antialiased: bool) -> None:
    """gsplat's own torch implementation runs on CPU; its gradients come from autograd."""
    torch_impl = pytest.importorskip("gsplat.cuda._torch_impl", reason="gsplat is not installed")
    scene = random_scene(points=200, views=1, dtype=torch.float64)
    out, gradients = projected(scene, scene.all_rows(), antialiased)
    alive = out[4][:, 0] > 0
    for name in INPUTS:
        getattr(scene, name).requires_grad_()
    covariances, _ = torch_impl._quat_scale_to_covar_preci(scene.quats, scene.scales, True, False)
    seen, means2d, depths, conics, compensations = torch_impl._fully_fused_projection(
        scene.means, covariances, scene.viewmats, scene.Ks, *scene.sizes, calc_compensations=antialiased
    )
    undrawn = out[4][:, 0] < 0
    assert undrawn.sum() > 5 and torch.equal(-out[4][undrawn, 0], seen[0][undrawn])
    assert torch.equal(out[4][:, 0] != 0, seen[0] > 0)
    opacities = scene.opacities if compensations is None else scene.opacities * compensations[0]
    theirs = (means2d[0], conics[0], depths[0], opacities)
    for ours, other in zip(out[:4], theirs, strict=True):
        assert_close(ours[alive], other[alive], rtol=1e-9, atol=1e-9)
    expected = torch.autograd.grad(
        [other[alive] for other in theirs], [getattr(scene, n) for n in INPUTS], [v[alive] for v in weights(out[:4])]
    )
    for name, got, want in zip(INPUTS, gradients, expected, strict=True):
        assert want.norm() > 0 and (got - want).norm() <= 1e-8 * want.norm(), name


def test_radii_hold_the_visible_ellipse(either: str) -> None:
    """No pixel outside the box has alpha >= 1/255, and the box is at most 2 pixels too wide."""
    scene = random_scene(points=400, dtype=torch.float64)
    for antialiased in (False, True):
        means2d, conics, _, opacities, radii = scene.project(*scene.all_rows(), antialiased=antialiased)
        alive = radii[:, 0] > 0
        a, b, c = conics[alive].unbind(-1)
        det = a * c - b * b
        cutoff = 2 * torch.log(255 * opacities[alive])
        exact = torch.sqrt(cutoff[:, None].clamp_min(0) * torch.stack([c, a], -1) / det[:, None])
        excess = radii[alive] - exact
        assert (excess >= 0).all() and (excess <= 2 + 1e-3 * exact).all()
        assert ((means2d + radii > 0) & (means2d - radii < 100))[alive].all()


@pytest.mark.parametrize(
    ("changes", "alive"),  # None: not drawn, and still one that densification counts as seen
    [
        ({}, True),
        ({"means": [[0.0, 0.0, 0.0]]}, False),  # at the camera's own plane: nothing divides by its depth
        ({"means": [[0.3, 0.2, 0.0]]}, False),
        ({"means": [[0.0, 0.0, -5.0]]}, False),
        ({"means": [[0.0, 0.0, 0.0625]], "scales": [[1e-3] * 3]}, True),  # on the near plane (given below)
        ({"means": [[0.0, 0.0, 0.0624]], "scales": [[1e-3] * 3]}, False),
        ({"means": [[0.0, 0.0, 101.0]], "scales": [[1.0] * 3]}, False),  # beyond the far plane
        ({"opacities": [1.01 / 255]}, True),
        ({"opacities": [0.99 / 255]}, None),
        ({"opacities": [0.0]}, None),
        ({"means": [[2.9, 0.0, 5.0]]}, False),  # outside of the image
        ({"means": [[2.6, 0.0, 5.0]]}, True),  # its border overlaps the image
        ({"means": [[float("nan"), 0.0, 5.0]]}, False),
        ({"scales": [[0.0, 0.0, 0.0]]}, True),  # a speck: the blur alone
        ({"quats": [[0.0, 0.0, 2.0, 0.0]]}, True),  # any length
    ],
)
def test_dead_or_alive(either: str, changes: dict[str, list[float]], alive: bool | None) -> None:
    scene = one_point(**changes)
    for name in INPUTS:
        getattr(scene, name).requires_grad_()
    row = torch.zeros(1, dtype=torch.int32)
    out = scene.project(row, row, near=0.0625, far=100.0)
    assert out.radii.sign().unique().tolist() == [{True: 1, False: 0, None: -1}[alive]]
    if alive:
        assert all(torch.isfinite(o).all() for o in out) and out.depths[0] == scene.means[0, 2]
    else:
        assert all((o == 0).all() for o in out[:4])
    if not torch.isnan(scene.means).any():
        gradients = torch.autograd.grad([o.sum() for o in out[:4]], [getattr(scene, n) for n in INPUTS])
        assert all(torch.isfinite(g).all() for g in gradients)
        assert any((g != 0).any() for g in gradients) == bool(alive)
    if alive:
        assert len(cuda_ext.cull(scene.means, scene.scales, scene.opacities, scene.viewmats, scene.Ks, scene.sizes,
                                 scene.whole, near=0.0625, far=100.0)[0]) == 1  # fmt: skip


def test_singular_covariance_is_dead_without_blur(either: str) -> None:
    scene = one_point(scales=[[0.2, 0.0, 0.0]])
    row = torch.zeros(1, dtype=torch.int32)
    assert (scene.project(row, row, eps2d=0.0).radii == 0).all()
    assert (scene.project(row, row).radii > 0).all()
    assert (scene.project(row, row, antialiased=True).radii < 0).all()  # its compensated opacity is 0


def test_overflowing_covariance_is_dead(either: str) -> None:
    """Not alive with a conic of NaN."""
    scene = one_point(torch.float32, scales=[[1e25, 1e25, 1e25]])
    for antialiased in (False, True):
        assert all((o == 0).all() for o in scene.project(*scene.all_rows(), antialiased=antialiased))


def test_jacobian_clamp_stops_gradients(either: str) -> None:
    """A wide splat beyond 1.3 times the half image: its conic no longer depends on where it is along x."""
    row = torch.zeros(1, dtype=torch.int32)
    for x, free in ((3.2, True), (3.3, False)):  # clamped at x/z = (50 + 15) / 100, z = 5
        scene = one_point(means=[[x, 0.1, 5.0]], scales=[[2.0, 1.5, 1.8]])
        scene.means.requires_grad_()
        conics = scene.project(row, row).conics
        (gradient,) = torch.autograd.grad(conics.sum(), scene.means)
        assert (gradient[0, 0] != 0) == free and gradient[0, 1] != 0 and gradient[0, 2] != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cull_loses_nothing(either: str, dtype: torch.dtype) -> None:
    """Brute force: every row with alpha >= 1/255 at a pixel centre of the rectangle is kept."""
    dropped = 0
    for seed in range(6):
        scene = random_scene(points=250, views=2, seed=seed, dtype=dtype)
        sub = torch.randint(0, 40, (2, 2), generator=torch.Generator().manual_seed(seed)).tolist()
        rects = [n for x, y in sub for n in (x, y, x + 17, y + 9)]
        rows = scene.all_rows()
        out = scene.project(*rows)
        for rect in (rects, scene.whole):
            kept = torch.zeros(2, 250, dtype=torch.bool)
            view_ids, point_ids = scene.cull(rect)
            kept[view_ids.long(), point_ids.long()] = True
            peak = torch.stack([largest_alpha(out, rows[0] == v, rect[4 * v : 4 * v + 4]) for v in range(2)])
            assert not ((peak >= 1 / 255) & ~kept).any()
            dropped += int((~kept).sum())
    assert dropped > 2000  # of 6000: it does cull


def largest_alpha(out: cuda_ext.Projection, rows: Tensor, rect: list[int]) -> Tensor:
    """Return the greatest alpha of each of these rows over the pixel centres of a rectangle."""
    x0, y0, x1, y1 = rect
    y, x = torch.meshgrid(torch.arange(y0, y1) + 0.5, torch.arange(x0, x1) + 0.5, indexing="ij")
    d = out.means2d[rows][:, None, :] - torch.stack([x, y], -1).view(1, -1, 2).to(out.means2d)
    a, b, c = out.conics[rows][:, None, :].unbind(-1)
    sigma = 0.5 * (a * d[..., 0] ** 2 + c * d[..., 1] ** 2) + b * d[..., 0] * d[..., 1]
    return (out.row_opacities[rows][:, None] * torch.exp(-sigma.clamp_min(0))).amax(1)


@pytest.mark.usefixtures("native")
def test_cull_keeps_what_the_box_touches() -> None:
    """So no strategy that renders only a rectangle loses a splat that `intersect` would have listed there."""
    scene = random_scene(points=2000, views=3)
    rects = [10, 20, 37, 41, 0, 0, 5, 70, 30, 30, 31, 31]
    view_ids, point_ids = scene.all_rows()
    means2d, *_, radii = scene.project(view_ids, point_ids)
    rect = torch.tensor(rects, dtype=torch.float32).view(3, 4)[view_ids.long()]
    low, high = means2d - radii, means2d + radii
    touch = (radii[:, 0] > 0) & ((high > rect[:, :2]) & (low < rect[:, 2:])).all(-1)
    kept = torch.zeros(3, 2000, dtype=torch.bool)
    got = scene.cull(rects)
    kept[got[0].long(), got[1].long()] = True
    assert touch.sum() > 20 and not (touch & ~kept.view(-1)).any()


def test_cull_keeps_what_counts_as_seen(either: str) -> None:
    """Or densification's means over the views that see a point would be over too few."""
    scene = random_scene(points=3000, views=3)
    scene.opacities[::5] = 1e-3
    view_ids, point_ids = scene.all_rows()
    radii = scene.project(view_ids, point_ids).radii[:, 0]
    kept = torch.zeros(3, 3000, dtype=torch.bool)
    got = scene.cull(scene.whole)
    kept[got[0].long(), got[1].long()] = True
    assert int((radii < 0).sum()) > 20 and not ((radii != 0) & ~kept.view(-1)).any()


def test_rows_are_sorted_and_empty_rectangles_see_nothing(either: str) -> None:
    scene = random_scene(points=500, views=3)
    view_ids, point_ids = scene.cull([*scene.whole[:4], 10, 10, 10, 30, *scene.whole[8:]])
    key = view_ids.long() * 500 + point_ids
    assert (key[1:] > key[:-1]).all() and set(view_ids.tolist()) == {0, 2}
    assert view_ids.dtype == point_ids.dtype == torch.int32


@pytest.mark.parametrize(("points", "views"), [(0, 2), (5, 0), (0, 0)])
def test_empty(either: str, points: int, views: int) -> None:
    scene = random_scene(points=points, views=views)
    rows = scene.cull()
    assert [len(ids) for ids in rows] == [0, 0]
    out, gradients = projected(scene, rows, False)
    assert [list(o.shape) for o in out] == [[0, 2], [0, 3], [0], [0], [0, 2]]
    assert [g.shape for g in gradients] == [getattr(scene, n).shape for n in INPUTS]
    assert all((g == 0).all() for g in gradients)


@pytest.mark.usefixtures("native")
def test_same_bits_on_any_number_of_threads() -> None:
    scene = random_scene(points=5000, views=2)

    def run() -> list[Tensor]:
        rows = scene.cull()
        return [*rows, *(t for part in projected(scene, rows, False) for t in part)]

    same_on_threads(run)


@pytest.mark.usefixtures("native")
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    scene = random_scene(points=300)
    view_ids, point_ids = scene.all_rows()
    whole = scene.project(view_ids, point_ids)
    part = scene.project(view_ids[37::3], point_ids[37::3])
    assert all(torch.equal(a[37::3], b) for a, b in zip(whole, part, strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("antialiased", [False, True])
def test_opcheck(antialiased: bool) -> None:
    scene = random_scene(points=20, dtype=torch.float64)
    cameras = (scene.viewmats, scene.Ks, scene.sizes)
    rows = scene.cull()
    torch.library.opcheck(OPS.cull, (scene.means, scene.scales, scene.opacities, *cameras, scene.whole, 0.3, 0.01, 1e9))
    inputs = (scene.means, scene.quats, scene.scales, scene.opacities, *cameras, *rows, 0.3, 0.01, 1e9, antialiased)
    out = OPS.project(*inputs)
    torch.library.opcheck(OPS.project_backward, (*inputs, out[1], out[4], *(torch.randn_like(o) for o in out[:4])))
    for name in INPUTS:
        getattr(scene, name).requires_grad_()
    torch.library.opcheck(OPS.project, inputs)


def test_wrong_arguments_are_named(either: str) -> None:
    scene = random_scene(points=10)
    rows = scene.all_rows()
    with pytest.raises(ValueError, match=r"0 < near < far"):
        scene.project(*rows, near=0.0)
    with pytest.raises(TypeError, match=r"view_ids is torch\.int64"):
        scene.project(rows[0].long(), rows[1])
    scene.sizes = [1, 2, 3]
    with pytest.raises(ValueError, match="sizes must hold 2 ints a view, 4 in all, not 3"):
        scene.project(*rows)
    scene = random_scene(points=10)
    scene.quats = scene.quats[:, :3]
    with pytest.raises(ValueError, match=r"quats must have the shape \[10, 4\]"):
        scene.project(*rows)
    scene.quats = torch.randn(10, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"quats is torch.float64 on cpu; it must be torch.float32"):
        scene.project(*rows)


@pytest.mark.usefixtures("native")
def test_wrong_rows_are_refused() -> None:
    scene = random_scene(points=10)
    ids = torch.tensor([0, 0], dtype=torch.int32)
    for points in ([3, 3], [4, 3]):
        with pytest.raises(ValueError, match="sorted by"):
            scene.project(ids, torch.tensor(points, dtype=torch.int32))
    with pytest.raises(IndexError, match="does not exist"):
        scene.project(ids, torch.tensor([0, 10], dtype=torch.int32))
