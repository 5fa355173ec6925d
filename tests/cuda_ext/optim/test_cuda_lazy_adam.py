"""Deferred steps of the CUDA kernels, compared with the dense kernels and with the CPU operators."""

from typing import Any

import pytest
import torch

from cuda_ext.ops.optim.fused import SplatRows
from cuda_ext.ops.optim.lazy_adam import MOST_STEPS, LazyAdam
from tests.cuda_ext.fused_steps import make_records, to
from tests.cuda_ext.lazy_steps import (
    StepRun,
    assert_same_bits,
    differences,
    fresh_model,
    in_graphs,
    row_records,
    step_scalars,
)

pytestmark = pytest.mark.gpu
CASES = [
    # points, views, degree, bases stored, antialiased
    (900, 2, 3, 15, False),
    (999, 1, 2, 15, True),
    (701, 2, 1, 3, False),
    (257, 1, 0, 0, False),
    (255, 1, None, 0, False),
    (33, 2, 0, 15, False),
]


def make_run(case: tuple[Any, ...], lazy: bool) -> StepRun:
    points, views, degree, bases, antialiased = case
    model = fresh_model(points, views, torch.float32, bases).to("cuda")
    return StepRun(model, lazy, degree, antialiased=antialiased)


def drawn(rows: SplatRows) -> set[tuple[int, int]]:
    alive = (rows.radii > 0).all(-1)
    return set(zip(rows.view_ids[alive].tolist(), rows.point_ids[alive].tolist(), strict=True))


def assert_near(one: StepRun, other: StepRun, limit: float) -> None:
    """Near in the mean; a gradient that is nothing but rounding moves a single parameter by as much as a step."""
    for name, difference in differences(one, other, mean=True).items():
        assert difference < limit, f"{name}: {difference}"


@pytest.mark.parametrize("case", CASES)
def test_lazy_run_equals_the_dense_run(case: tuple[Any, ...]) -> None:
    dense, lazy = make_run(case, False), make_run(case, True)
    for step in range(33):
        dense.step(step)
        lazy.step(step)
        assert len(drawn(lazy.rows) ^ drawn(dense.rows)) <= 1, "of a point at the rim"
        assert int(lazy.rows.count) >= int(dense.rows.count) - 1
        if step == 19:
            lazy.flush()
    assert lazy.longest_gap >= 8
    assert max(differences(dense, lazy, mean=True).values()) > 0.05, "no step was deferred"
    lazy.flush()
    assert_near(dense, lazy, 1e-2)
    for ours, theirs in zip(lazy.statistics.values(), dense.statistics.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_what_the_cpu_composes(case: tuple[Any, ...]) -> None:
    """From one state in the middle of a block: the rows, the update, the table and the flush."""
    ours = make_run(case, True)
    for step in range(9):
        ours.step(step)
    assert ours.lazy is not None
    theirs = StepRun(ours.model.to("cpu", torch.float64), True, ours.degree, **ours.settings)
    theirs._viewmats = ours._viewmats.cpu().double()
    held = (ours.lazy.last.to("cpu", copy=True), ours.lazy.table.cpu().double(), ours.lazy.steps.to("cpu", copy=True))
    theirs.lazy = LazyAdam(*held)
    rows, expected = ours.forward(9), theirs.forward(9)
    assert len(drawn(rows) ^ drawn(expected)) <= 1
    ours.model.scalars, theirs.model.scalars = step_scalars(9, torch.float32).cuda(), step_scalars(9)
    same = to(rows, "cpu", torch.float64)
    for one, its in ((ours, rows), (theirs, same)):
        one.model.update(its, row_records(its, 9), one.degree, lazy=one.lazy, **one.settings)
    assert torch.equal(ours.lazy.last.cpu(), theirs.lazy.last) and int(ours.lazy.steps) == 10
    torch.testing.assert_close(ours.lazy.table.cpu().double(), theirs.lazy.table, rtol=1e-5, atol=1e-9)
    assert_near(ours, theirs, 1e-2)
    ours.flush()
    theirs.flush()
    assert_near(ours, theirs, 1e-2)


def test_flush_twice_is_flush_once() -> None:
    one = make_run(CASES[0], True)
    for step in range(3):
        one.step(step)
    one.flush()
    assert one.lazy is not None and not one.lazy.last.any() and int(one.lazy.steps) == 0
    assert torch.equal(one.lazy.table, LazyAdam.make(1, "cuda").table)
    before = [t.clone() for t in (*one.model.params, *one.model.exp_avgs, *one.model.exp_avg_sqs)]
    one.flush()
    now = (*one.model.params, *one.model.exp_avgs, *one.model.exp_avg_sqs)
    assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))


def test_at_most_64_deferred_steps_and_no_disabled_one() -> None:
    one = make_run(CASES[3], True)
    assert one.lazy is not None
    for step in range(MOST_STEPS):
        one.step(step)
    held = (*one.model.params, *one.model.exp_avg_sqs, one.lazy.last, one.lazy.table, one.lazy.steps)
    before = [t.clone() for t in held]
    one.step(MOST_STEPS)
    assert int(one.lazy.steps) == MOST_STEPS
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    one.flush()
    one.step(MOST_STEPS)
    before = [t.clone() for t in held]
    one.model.scalars = torch.tensor([0.0, 1, 1, 1, 1, 1, 0, 0], device="cuda").repeat(6, 1)
    none = one.rows._replace(count=torch.zeros_like(one.rows.count))
    one.model.update(none, make_records(none), one.degree, lazy=one.lazy)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


def test_a_block_in_a_graph() -> None:
    """A step and a flush, each captured once, are those that are launched; and neither waits for the device."""
    plain, graphed, warm = (make_run(CASES[0], True) for _ in range(3))
    in_graphs(plain, graphed, warm)
    assert_same_bits(plain, graphed)


def test_flush_of_more_than_2_to_the_31_bytes() -> None:
    count = 13_000_000
    shapes = [(count, 3), (count, 4), (count, 3), (count,), (count, 3), (count, 15, 3)]
    params = [torch.zeros(s, device="cuda") for s in shapes]
    moments = [torch.ones_like(p) for p in params]
    squares = [torch.ones_like(p) for p in params]
    lazy = LazyAdam.make(count, "cuda")
    small = fresh_model(1, 1, torch.float32).to("cuda")
    params[0][:, 2], params[1][:, 0] = -5.0, 1.0
    rows = small.forward(0)
    model = type(small)(
        params, moments, squares, step_scalars(5, torch.float32).cuda(), small.viewmats, small.Ks, [9, 9]
    )
    model.update(rows, make_records(rows), lazy=lazy)
    assert (params[5] == 0).all() and int(lazy.steps) == 1
    torch.ops.ns_multigpu.splat_flush(params, moments, squares, lazy.last, lazy.table, lazy.steps)
    first = params[5][0, 0, 0]
    assert first < 0 and (params[5] == first).all() and (moments[5] == 0.9).all() and (params[4] < 0).all()
