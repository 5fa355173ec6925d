"""splat_forward and splat_update put together on CPU: what the other operators, autograd and torch's Adam give."""

from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext.ops.optim.fused import PARAMETERS, SplatRows
from cuda_ext.ops.optim.lazy_adam import LazyAdam
from ns_multigpu.core.types import Hits, Points, Splats
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier, densification_info
from ns_multigpu.primitives.gaussians.functions import Gaussians
from ns_multigpu.primitives.shading import row_colors
from tests.cuda_ext.fused_steps import RATES, Model, make_model, make_records
from tests.strategies.scene import make_points, make_views

F64 = torch.float64
CASES = [(False, False, 3), (True, True, 2), (False, True, 0), (False, False, None)]
pytestmark = pytest.mark.usefixtures("native")


def by_hand(
    model: Model, rows: SplatRows, records: Tensor, degree: int | None, depth: bool, **settings: Any
) -> list[Tensor]:
    """Return the gradients of the parameters, through the public operators."""
    leaves = [p.clone().requires_grad_() for p in model.params]
    means, quats, log_scales, logits, sh_dc, sh_rest = leaves
    n = int(rows.count)
    ids = (rows.view_ids[:n], rows.point_ids[:n])
    out = cuda_ext.project(
        means, quats, log_scales.exp(), logits.sigmoid(), model.viewmats, model.Ks, model.sizes, *ids, **settings
    )
    named = {"means": means, "features_dc": sh_dc, "features_rest": sh_rest}
    colors = row_colors(named, degree, model.viewmats, *ids)
    alive = (out.radii > 0).all(-1, keepdim=True)
    numbers = torch.cat([out.means2d, out.conics, out.row_opacities[:, None], colors * alive], dim=1)
    loss = (numbers * records[:n, :9]).sum()
    if depth:
        loss = loss + (out.depths * records[:n, 9]).sum()
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize(("antialiased", "degree"), [(antialiased, degree) for antialiased, _, degree in CASES])
def test_forward_is_the_operators(antialiased: bool, degree: int | None) -> None:
    model = make_model(spread=1.5)
    rows = model.forward(700, degree, antialiased=antialiased)
    n = int(rows.count)
    assert 0 < n < 600 and 0 < int((rows.radii[:n, 0] < 0).sum()) < n // 2
    assert (rows.point_ids[n:] == -1).all() and (rows.view_ids[n:] == 1).all()
    assert all((t[n:] == 0).all() for t in rows[3:])
    keys = rows.view_ids[:n].long() * 300 + rows.point_ids[:n]
    assert (keys.diff() > 0).all()
    _, quats, log_scales, logits, sh_dc, sh_rest = model.params
    ids = (rows.view_ids[:n], rows.point_ids[:n])
    cameras = (model.viewmats, model.Ks, model.sizes)
    opacities = 1.0 / (1.0 + torch.exp(-logits))  # torch's own sigmoid rounds a tensor's last numbers otherwise
    out = cuda_ext.project(model.params[0], quats, log_scales.exp(), opacities, *cameras, *ids, antialiased=antialiased)
    for got, want in ((rows.means2d, 0), (rows.conics, 1), (rows.depths, 2), (rows.opacities, 3), (rows.radii, 4)):
        assert torch.equal(got[:n], out[want])
    named = {"means": model.params[0], "features_dc": sh_dc, "features_rest": sh_rest}
    colors = row_colors(named, degree, model.viewmats, *ids) * (out.radii[:, :1] > 0)
    torch.testing.assert_close(rows.features[:n], colors, rtol=1e-15, atol=0.0)


def test_overflow_keeps_the_first_rows_and_is_reported() -> None:
    model = make_model()
    whole, part = model.forward(700), model.forward(50)
    assert int(part.count) == int(whole.count) > 50
    for a, b in zip(part[3:], whole[3:], strict=True):
        assert torch.equal(a, b[:50])


@pytest.mark.parametrize(("antialiased", "depth", "degree"), CASES)
def test_update_is_torchs_adam(antialiased: bool, depth: bool, degree: int | None) -> None:
    model = make_model()
    rows = model.forward(700, degree, antialiased=antialiased)
    records = make_records(rows, depth)
    expected = by_hand(model, rows, records, degree, depth, antialiased=antialiased)
    params = [torch.nn.Parameter(p.clone()) for p in model.params]
    for p, gradient, rate, m, v in zip(params, expected, RATES, model.exp_avgs, model.exp_avg_sqs, strict=True):
        optimizer = torch.optim.Adam([p], lr=rate, eps=1e-15)
        optimizer.state[p] = {"step": torch.tensor(6.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        p.grad = gradient
        optimizer.step()
    model.update(rows, records, degree, antialiased=antialiased, depth=depth)
    for name, found, p in zip(PARAMETERS, model.params, params, strict=True):
        torch.testing.assert_close(found, p.detach(), rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_regularisation_is_of_drawn_rows() -> None:
    """Once for each view that draws a point, and not of points that no view draws."""
    model = make_model(40)
    rows = model.forward(200)
    records = torch.zeros_like(make_records(rows))
    drawn = rows.point_ids[(rows.radii > 0).all(-1)].long()
    views = drawn.bincount(minlength=40)
    assert 0 in views and len(model.sizes) // 2 in views and len(views.unique()) > 2
    leaves = [model.params[i].clone().requires_grad_() for i in (2, 3)]
    (0.3 * leaves[1][drawn].sigmoid().sum() + 0.2 * leaves[0][drawn].exp().sum()).backward()
    before = [model.exp_avgs[i].clone() for i in (2, 3)]
    model.update(rows, records, opacity_weight=0.3, scale_weight=0.2)
    for i, leaf, old in zip((2, 3), leaves, before, strict=True):
        torch.testing.assert_close(model.exp_avgs[i], 0.9 * old + 0.1 * leaf.grad, rtol=1e-12, atol=1e-14)


def test_means_of_small_points_take_a_part_of_a_step() -> None:
    """Of the step without moments from before: Adam's is as long for any gradient."""
    made = make_model(40)
    scales = made.params[2].exp().sort(dim=-1).values[:, 1]
    whole = float(scales.median())
    rows = made.forward(200)
    drawn = rows.point_ids[(rows.radii > 0).all(-1)].long().unique()
    moved: dict[float, list[Tensor]] = {}
    for scale in (0.0, whole):
        model = make_model(40)
        for moment in (*model.exp_avgs, *model.exp_avg_sqs):
            moment.zero_()
        before = [p.clone() for p in model.params]
        model.update(rows, make_records(rows), whole_step_scale=scale)
        moved[scale] = [p - old for p, old in zip(model.params, before, strict=True)]
    part = (scales / whole).clamp(max=1)[drawn, None]
    assert 5 < int((part < 1).sum()) < len(drawn) - 5
    torch.testing.assert_close(moved[whole][0][drawn], part * moved[0.0][0][drawn])
    assert all(torch.equal(a, b) for a, b in zip(moved[whole][1:], moved[0.0][1:], strict=True))


def test_needles_are_of_all_points() -> None:
    model = make_model(40)
    rows = model.forward(200)
    records = torch.zeros_like(make_records(rows))
    leaf = model.params[2].clone().requires_grad_()
    scales = leaf.exp()
    excess = (scales.amax(-1) / scales.amin(-1) - 4).clamp(min=0)
    assert 5 < int((excess > 0).sum()) < 35
    (0.3 * excess.sum()).backward()
    before, weight = model.exp_avgs[2].clone(), torch.tensor([0.3], dtype=torch.float64)
    model.update(rows, records, needles=weight, max_ratio=4)
    torch.testing.assert_close(model.exp_avgs[2], 0.9 * before + 0.1 * leaf.grad, rtol=1e-12, atol=1e-14)
    lazy = LazyAdam.make(40, "cpu", torch.float64)
    with pytest.raises(ValueError, match="needles are of all points"):
        model.update(rows, records, needles=weight, max_ratio=4, lazy=lazy)


@pytest.mark.parametrize("absgrad", [False, True])
def test_statistics_are_the_densifiers(absgrad: bool) -> None:
    views = make_views(3, torch.float32, "cpu")
    points = make_points(300, torch.float32, "cpu", seed=4)
    primitive = Gaussians(sh_degree=0, absgrad=absgrad)
    splats: Splats = primitive.splat(points, primitive.cull(points, views, range(3)), views)
    p = {k: v.detach() for k, v in points.params.items()}
    raw = [p["means"], p["quats"], p["scales"], p["opacities"].reshape(-1), p["features_dc"], p["features_rest"]]
    cameras = (torch.stack([v.viewmat for v in views]).detach(), torch.stack([v.K for v in views]))
    sizes = [n for v in views for n in (v.width, v.height)]
    model = Model(raw, *([torch.zeros_like(t) for t in raw] for _ in range(2)), torch.zeros(6, 8), *cameras, sizes)
    rows = model.forward(1000, 0)
    n = int(rows.count)
    assert torch.equal(rows.point_ids[:n], splats.hits.point_ids)
    records = make_records(rows)
    assert splats.probe is not None
    splats.probe.grad = records[:n, 10:12] if absgrad else records[:n, :2]
    densifier = ReplicatedDensifier(refine_scale2d_stop_iter=100)
    state = densifier.initialize_state()
    densifier.count(dict(points.params), state, densification_info(splats, views))
    densifier.count(dict(points.params), state, densification_info(splats, views))
    ours = [torch.zeros(300) for _ in range(3)]
    for _ in range(2):
        model.update(
            rows, records, 0, absgrad=absgrad,
            **dict(zip(("grad2d", "seen", "radii_max"), ours, strict=True)),
        )  # fmt: skip
    for found, name in zip(ours, ("grad2d", "count", "radii"), strict=True):
        assert state[name].max() > 0
        torch.testing.assert_close(found, state[name], rtol=1e-5, atol=1e-6)
    assert isinstance(splats.hits, Hits) and isinstance(points, Points)


def test_no_views_no_points_no_rows() -> None:
    for model in (make_model(0), make_model(20, 0)):
        rows = model.forward(5)
        assert int(rows.count) == 0 and (rows.point_ids == -1).all()
        before = [p.clone() for p in model.params]
        model.update(rows, make_records(rows))
        assert all((p != q).all() for p, q in zip(model.params, before, strict=True))  # Adam's momentum


def test_the_registered_operators() -> None:
    model = make_model(20)
    direct = model.to("cpu", F64)
    ops = torch.ops.ns_multigpu
    cameras = (model.viewmats, model.Ks, model.sizes)
    inputs = (*model.params, *cameras, 3, 0.3, 0.01, 1e9, True, 60)
    torch.library.opcheck(ops.splat_forward, inputs, test_utils="test_schema")
    rows = SplatRows(*ops.splat_forward(*inputs))
    records = make_records(rows)

    def arguments(m: Model) -> tuple[Any, ...]:
        given = (rows.view_ids, rows.point_ids, rows.count, rows.conics, rows.features, rows.radii, records)
        statistics = [torch.zeros(20, dtype=F64) for _ in range(3)]
        lists = (m.params, m.exp_avgs, m.exp_avg_sqs, m.scalars)
        return (*lists, *cameras, *given, *statistics, 3, 0.3, 0.01, 1e9, True, False, False, 0.0, 0.0)

    # opcheck runs an operator below autograd, which the composition of splat_update needs: so it is only called.
    ops.splat_update(*arguments(direct))
    model.update(rows, records, far=1e9, antialiased=True)
    assert all(torch.equal(a, b) for a, b in zip(model.params, direct.params, strict=True))
