"""The fused kernels on CUDA against what the CPU composes in float64: rows, parameters, moments, statistics."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.optim.fused import PARAMETERS, SplatRows, splat_update
from cuda_ext.ops.optim.lazy_adam import LazyAdam
from tests.cuda_ext.fused_steps import Model, make_model, make_records, to
from tests.cuda_ext.graphs import captured

pytestmark = pytest.mark.gpu
F64 = torch.float64
CASES = [
    # points, views, degree, bases stored, antialiased, depth
    (5000, 3, 3, 15, False, False),
    (1999, 1, 3, 15, True, True),
    (1000, 5, 2, 15, False, True),
    (777, 2, 1, 3, True, False),
    (333, 40, 2, 8, False, False),
    (257, 2, 0, 0, False, True),
    (31, 2, 0, 15, False, False),
    (300, 2, None, 0, True, False),
    (130, 3, None, 15, False, True),
]


def close(found: Tensor, expected: Tensor, rtol: float, name: str, floor: float = 0.0) -> None:
    """Close as float32 sums of terms as large as the largest can be, and not all zero."""
    expected = expected.to(found.device, found.dtype)
    atol = max(floor, rtol * float(expected.abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")


def settings_of(case: tuple[Any, ...]) -> tuple[Model, int | None, dict[str, bool], bool]:
    """Return a model, its degree, settings of its forward pass, and whether depths have gradients."""
    points, views, degree, bases, antialiased, depth = case
    model = make_model(points, views, seed=points, rest=bases, spread=1.5)
    return model.to("cpu", torch.float32).to("cpu", F64), degree, {"antialiased": antialiased}, depth


@pytest.mark.parametrize("case", CASES)
def test_forward(case: tuple[Any, ...]) -> None:
    model, degree, settings, _ = settings_of(case)
    capacity = case[0] * case[1] + 100
    expected = model.forward(capacity, degree, **settings)
    found = model.to("cuda").forward(capacity, degree, **settings)
    n = int(found.count)
    assert n > 20
    assert (found.point_ids[n:] == -1).all() and (found.view_ids[n:] == case[1] - 1).all()
    assert all((t[n:] == 0).all() for t in found[3:])
    keys = found.view_ids[:n].long() * case[0] + found.point_ids[:n]
    assert (keys.diff() > 0).all()
    # Points at the rim of what is kept may differ by rounding; rows that are drawn in both must agree.
    m = int(expected.count)
    theirs = expected.view_ids[:m].long() * case[0] + expected.point_ids[:m]
    assert abs(n - m) <= 2
    alive = keys[(found.radii[:n] > 0).all(-1)].cpu()
    wanted = theirs[(expected.radii[:m] > 0).all(-1)]
    assert len(set(alive.tolist()) ^ set(wanted.tolist())) <= 2
    both = torch.tensor(sorted(set(alive.tolist()) & set(wanted.tolist())))
    ours, other = torch.searchsorted(keys.cpu(), both), torch.searchsorted(theirs, both)
    for name, rtol in (("means2d", 1e-4), ("depths", 1e-5), ("opacities", 2e-4), ("features", 1e-5)):
        close(getattr(found, name)[ours.cuda()], getattr(expected, name)[other], rtol, name)
    conics, exact = found.conics[ours.cuda()].cpu().double(), expected.conics[other]
    assert ((conics - exact).norm(dim=-1) <= 2e-3 * exact.norm(dim=-1)).all()
    assert (found.radii[ours.cuda()].cpu() - expected.radii[other]).abs().max() <= 1


def test_forward_twice_is_the_same_and_one_view_is_its_part() -> None:
    model = make_model(3000, 3).to("cuda")
    a, b = model.forward(9000), model.forward(9000)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    model.viewmats, model.Ks, model.sizes = model.viewmats[1:2], model.Ks[1:2], model.sizes[2:4]
    one = model.forward(3000)
    n, mine = int(one.count), a.view_ids[: int(a.count)] == 1
    assert n == int(mine.sum()) > 0
    for x, y in zip(one[3:], a[3:], strict=True):
        assert torch.equal(x[:n], y[: int(a.count)][mine])


def test_overflow_keeps_the_first_rows_and_is_reported() -> None:
    model = make_model(3000, 2).to("cuda")
    whole, part = model.forward(6000), model.forward(333)
    assert int(part.count) == int(whole.count) > 333
    for a, b in zip((*part[:2], *part[3:]), (*whole[:2], *whole[3:]), strict=True):
        assert torch.equal(a, b[:333])


@pytest.mark.parametrize("absgrad", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_update(case: tuple[Any, ...], absgrad: bool) -> None:
    model, degree, settings, depth = settings_of(case)
    device = model.to("cuda")
    # The same rows for both, those of the device: rims do not matter then.
    found_rows = device.forward(case[0] * case[1] + 64, degree, **settings)
    rows = to(found_rows, "cpu", F64)
    records = make_records(rows, depth).float()
    ours = {k: torch.full((case[0],), 0.5, device="cuda") for k in ("grad2d", "seen", "radii_max")}
    theirs = {k: v.cpu().double() for k, v in ours.items()}
    common = {**settings, "absgrad": absgrad, "depth": depth, "opacity_weight": 0.01, "max_ratio": 4.0}
    common["whole_step_scale"] = float(model.params[2].exp().median())
    needles = torch.tensor([0.02], dtype=F64)
    before = device.to("cuda")
    model.update(rows, records.double(), degree, needles=needles, **common, **theirs)
    device.update(found_rows, records.cuda(), degree, needles=needles.float().cuda(), **common, **ours)
    for i, name in enumerate(PARAMETERS):
        if model.params[i].numel() == 0:
            continue
        close(device.exp_avgs[i], model.exp_avgs[i], 2e-4, f"{name} exp_avg")
        close(device.exp_avg_sqs[i], model.exp_avg_sqs[i], 5e-4, f"{name} exp_avg_sq")
        moved, wanted = device.params[i] - before.params[i], model.params[i] - before.params[i].cpu().double()
        # What a parameter is rounded to is not the step's fault.
        close(moved, wanted, 1e-3, f"{name} step", floor=4e-7 * float(before.params[i].abs().max()))
        assert (moved != 0).any()
    assert float(ours["seen"].max()) > 1
    close(ours["grad2d"], theirs["grad2d"], 1e-5, "grad2d")
    assert torch.equal(ours["seen"].cpu().double(), theirs["seen"])
    one_pixel = 1.001 / min(max(w, h) for w, h in zip(model.sizes[::2], model.sizes[1::2], strict=True))
    difference = (ours["radii_max"].cpu().double() - theirs["radii_max"]).abs()  # a radius is rounded up to a pixel
    rounding = 1e-6 * (1 + theirs["radii_max"])
    assert float(difference.max()) <= one_pixel and float((difference > rounding).float().mean()) < 0.01


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradient_by_viewmats(case: tuple[Any, ...], lazy: bool) -> None:
    model, degree, settings, depth = settings_of(case)
    device = model.to("cuda")
    rows = device.forward(case[0] * case[1] + 64, degree, **settings)
    records = make_records(rows, depth)
    common = {**settings, "depth": depth}
    expected = torch.empty_like(model.viewmats)
    missed = LazyAdam.make(case[0], "cpu", F64) if lazy else None
    model.update(to(rows, "cpu", F64), records.cpu().double(), degree, **common, lazy=missed, v_viewmats=expected)
    found = []
    for _ in range(2):
        fresh, missed = device.to("cuda"), LazyAdam.make(case[0], "cuda") if lazy else None
        found.append(torch.full_like(fresh.viewmats, torch.nan))
        fresh.update(rows, records, degree, **common, lazy=missed, v_viewmats=found[-1])
    assert torch.equal(*found)
    assert (found[0][:, 3] == 0).all()
    for view in range(case[1]):
        close(found[0][view], expected[view], 5e-4, f"view {view}")


def test_statistics_may_be_left_out_and_rows_be_none() -> None:
    model = make_model(100, 2).to("cuda")
    rows = model.forward(0)
    before = [p.clone() for p in model.params]
    model.update(rows, make_records(rows))
    assert all((p != q).all() for p, q in zip(model.params, before, strict=True))  # Adam's momentum


def test_update_twice_is_the_same() -> None:
    results = []
    for _ in range(2):
        model = make_model(3000, 3).to("cuda")
        rows = model.forward(9000)
        model.update(rows, make_records(rows))
        results.append(model)
    for kind in ("params", "exp_avgs", "exp_avg_sqs"):
        assert all(torch.equal(a, b) for a, b in zip(*(getattr(m, kind) for m in results), strict=True))


def test_a_whole_step_in_a_graph() -> None:
    model = make_model(2000, 2).to("cuda")
    plain = model.to("cuda")
    records = make_records(plain.forward(4000))

    def step(m: Model) -> SplatRows:
        rows = m.forward(4000)
        m.update(rows, records)
        return rows

    step(plain)  # as `captured` takes one before its graph
    graph, rows = captured(lambda: step(model))
    for _ in range(3):
        graph.replay()
        expected = step(plain)
    assert torch.equal(rows.means2d, expected.means2d) and int(rows.count) == int(expected.count)
    assert all(torch.equal(a, b) for a, b in zip(model.params, plain.params, strict=True))


def test_neither_waits_for_the_device() -> None:
    model = make_model(2000, 2).to("cuda")
    rows = model.forward(4000)
    records = make_records(rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.update(model.forward(4000), records)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_points_that_are_not_drawn_get_no_gradient() -> None:
    """Points behind the camera, outside of the image, too transparent, or not finite."""
    model = make_model(4, 1).to("cuda")
    model.params[0].copy_(torch.tensor([[0.0, 0, -5], [900, 0, 5], [0, 0, 5], [torch.nan, 0, 5]]))
    model.params[3][2] = -9.0
    rows = model.forward(4)
    assert (rows.radii <= 0).all() and rows.count.tolist() == [1]
    records = torch.full_like(make_records(rows), torch.nan)
    expected = [0.9 * m for m in model.exp_avgs]
    model.update(rows, records)
    for m, e in zip(model.exp_avgs, expected, strict=True):
        torch.testing.assert_close(m, e, rtol=1e-6, atol=1e-8)


def test_more_than_2_to_the_31_bytes() -> None:
    """Harmonics of 13 M points are 2.3 GB; their last points are stepped like the first."""
    count = 13_000_000
    shapes = [(count, 3), (count, 4), (count, 3), (count,), (count, 3), (count, 15, 3)]
    params = [torch.zeros(s, device="cuda") for s in shapes]
    params[0][:, 2], params[1][:, 0], params[2][:] = -5.0, 1.0, -3.0
    params[0][-40:, 2] = 5.0
    moments = [torch.zeros_like(p) for p in params]
    squares = [torch.ones_like(p) for p in params]
    small = make_model(20, 1).to("cuda")
    model = Model(params, moments, squares, small.scalars, small.viewmats, small.Ks, small.sizes)
    model.viewmats[:] = torch.eye(4, device="cuda")
    rows = model.forward(100)
    assert rows.point_ids[:40].tolist() == list(range(count - 40, count)) and int(rows.count) == 40
    records = torch.ones_like(make_records(rows))
    splat_update(
        params, moments, squares, model.scalars, model.viewmats, model.Ks, model.sizes, rows, records, degree=3
    )
    assert (moments[5][-40:, :, 0] != 0).any() and (moments[5][:-40] == 0).all()
    assert (params[4][-40:] < 0).all() and (params[4][:-40] == 0).all()


@pytest.mark.parametrize("wrong", ["dtype", "degree", "alignment", "views"])
def test_wrong_arguments_are_named(wrong: str) -> None:
    model = make_model(20, 1).to("cuda")
    degree = 3
    if wrong == "dtype":
        model = make_model(20, 1).to("cuda", F64)
    elif wrong == "degree":
        model.params[5] = model.params[5][:, :8].contiguous()
    elif wrong == "alignment":
        model.params[1] = torch.cat([torch.zeros(1, device="cuda"), model.params[1].flatten()])[1:].view(20, 4)
    else:
        model.viewmats, model.Ks, model.sizes = model.viewmats.repeat(129, 1, 1), model.Ks.repeat(129, 1, 1), [9] * 258
    words = {"dtype": "float32", "degree": "15 bases", "alignment": "16 bytes", "views": "128 views"}
    with pytest.raises((TypeError, ValueError), match=words[wrong]):
        model.forward(20, degree)
