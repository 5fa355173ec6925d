"""Deferred steps equal dense Adam: composed on CPU, over blocks in which points enter and leave views."""

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import adam_step_torch
from cuda_ext.ops.optim.lazy_adam import MOST_STEPS, LazyAdam, lazy_serves, splat_flush
from cuda_ext.reference import lazy_adam as reference
from tests.cuda_ext.fused_steps import make_model, make_records
from tests.cuda_ext.lazy_steps import CAPACITY, StepRun, differences, distances, fresh_model, step_scalars

F64 = torch.float64
pytestmark = pytest.mark.usefixtures("native")


def trained(dtype: torch.dtype, *, lazy: bool) -> StepRun:
    """45 steps, in two blocks."""
    gone = StepRun(fresh_model(400, dtype=dtype), lazy=lazy)
    for step in range(45):
        gone.step(step)
        if lazy and step in (17, 44):
            gone.flush()
    return gone


def test_lazy_run_equals_the_dense_run() -> None:
    dense, lazy = trained(F64, lazy=False), trained(F64, lazy=True)
    assert lazy.longest_gap >= 12, "points must be out of view for long"
    assert 0.2 < lazy.drawn_share < 0.8
    for name, difference in differences(dense, lazy).items():
        assert difference < 1e-10, f"{name}: {difference} of a step"
    for name, theirs in dense.statistics.items():
        torch.testing.assert_close(lazy.statistics[name], theirs, rtol=1e-4, atol=1e-5)


def test_lazy_run_rounds_as_the_dense_run() -> None:
    """Compare both single-precision runs with the dense run in double precision.

    Adam divides by the size of the gradients. If those are nearly zero, their rounding is a large part of a step, and
    it depends on the processor. So the error of the dense run bounds that of the lazy run, except for the worst
    hundredth of all numbers.
    """
    truth = trained(F64, lazy=False)
    dense, lazy = trained(torch.float32, lazy=False), trained(torch.float32, lazy=True)
    theirs, ours = distances(dense, truth), distances(lazy, truth)
    for name, error in ours.items():
        assert float(error.quantile(0.99)) < 1.5 * float(theirs[name].quantile(0.99)) + 1e-6, name
        assert float(error.max()) < (0.2 if name.startswith("params") else 1e-3), name
    for name, sums in dense.statistics.items():
        pixel = 1 / 80 if name == "radii_max" else 0.0  # a radius is rounded up to one
        torch.testing.assert_close(lazy.statistics[name], sums, rtol=1e-4, atol=1e-5 + pixel)


@pytest.mark.parametrize("column", [0, 2, 3])
def test_a_wrong_table_would_show(column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shift, and the decay of either moment, one percent off a step."""
    extend = reference.extend

    def wrong(table: Tensor, steps: Tensor, scalars: Tensor) -> None:
        extend(table, steps, scalars)
        table[: int(steps), :, column] *= 1.01

    monkeypatch.setattr("cuda_ext.ops.optim.fused_composed.extend", wrong)
    dense, lazy = (StepRun(fresh_model(400), lazy=lazy) for lazy in (False, True))
    for step in range(20):
        dense.step(step)
        lazy.step(step)
    lazy.flush()
    assert max(differences(dense, lazy).values()) > 1e-3


def test_rows_equal_the_dense_run_within_a_block() -> None:
    dense, lazy = (StepRun(fresh_model(400), lazy=lazy) for lazy in (False, True))
    for step in range(12):
        dense.step(step)
        lazy.step(step)
        assert int(lazy.rows.count) == int(dense.rows.count)
        for name, a, b in zip(lazy.rows._fields, lazy.rows, dense.rows, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
    seen = lazy.forward(5)
    stale = lazy.model.forward(CAPACITY)
    assert (stale.opacities - seen.opacities).abs().max() > 1e-3, "no step was deferred"


def test_the_table_bounds_how_far_points_move() -> None:
    """Against any moments that Adam makes, with gradients as bad as can be: those that grow by beta2 / beta1 a step."""
    for growth in (0.999 / 0.9, 1.0, 3.0):
        m, v = torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64)
        for i in range(200):
            g = torch.full((1,), growth ** (i - 200), dtype=F64)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        lazy = LazyAdam.make(1, "cpu", F64)
        for step in range(30):
            reference.extend(lazy.table, lazy.steps, step_scalars(200 + step))
        zeros = [torch.zeros(1, 1, dtype=F64)] * 6
        (moved, *_), _, _ = reference.caught_up(zeros, [m.view(1, 1)] * 6, [v.view(1, 1)] * 6, lazy.last, lazy.table)
        share = float(moved.abs() / lazy.table[0, 0, 4])
        assert share <= 1.0
        if growth == 0.999 / 0.9:
            assert share > 0.99, "the bound is not tight"


def test_eps_counts_for_the_smallest_gradients() -> None:
    """Moments about eps, where dense Adam's divisor is no longer the root of the second moment alone."""
    m = torch.logspace(-19, -8, 40, dtype=F64)
    values, m2, v2 = torch.zeros(40, dtype=F64), m.clone(), (10 * m).square()
    lazy = LazyAdam.make(40, "cpu", F64)
    expected, dense_m, dense_v = values.clone(), m2.clone(), v2.clone()
    for step in range(3000, 3030):
        scalars = step_scalars(step)
        reference.extend(lazy.table, lazy.steps, scalars)
        adam_step_torch([expected], [torch.zeros(40, dtype=F64)], [dense_m], [dense_v], scalars[:1], False)
    params, _, squares = reference.caught_up([values] * 6, [m2] * 6, [v2] * 6, lazy.last, lazy.table)
    torch.testing.assert_close(params[0], expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(squares[0], dense_v, rtol=1e-10, atol=0)
    assert expected[0].abs() < 0.01 * expected[-1].abs(), "eps has to matter"


def test_flush_resets_and_is_idempotent() -> None:
    run = StepRun(fresh_model(60), lazy=True)
    for step in range(3):
        run.step(step)
    assert run.lazy is not None
    assert int(run.lazy.steps) == 3 and len(run.lazy.last.unique()) > 1
    run.flush()
    assert int(run.lazy.steps) == 0 and not run.lazy.last.any()
    assert torch.equal(run.lazy.table, LazyAdam.make(1, "cpu", F64).table)
    before = [p.clone() for p in run.model.params]
    run.flush()
    assert all(torch.equal(p, q) for p, q in zip(run.model.params, before, strict=True))


def test_cancelled_step_leaves_state_unchanged() -> None:
    run = StepRun(fresh_model(60), lazy=True)
    for step in range(3):
        run.step(step)
    assert run.lazy is not None
    held = [*run.model.params, *run.model.exp_avgs, *run.model.exp_avg_sqs]
    held += [run.lazy.last, run.lazy.table, run.lazy.steps]
    before = [t.clone() for t in held]
    run.model.scalars = torch.tensor([0.0, 1, 1, 1, 1, 1, 0, 0], dtype=F64).repeat(6, 1)
    rows = run.forward(3)
    run.model.update(rows._replace(count=torch.zeros(1, dtype=torch.int64)), make_records(rows), lazy=run.lazy)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


def test_step_buffer_has_a_limit() -> None:
    run = StepRun(fresh_model(8), lazy=True)
    for step in range(MOST_STEPS):
        run.step(step)
    with pytest.raises(ValueError, match="call splat_flush"):
        run.step(MOST_STEPS)
    run.flush()
    run.step(MOST_STEPS)


def test_points_never_drawn_and_none_at_all() -> None:
    for model in (make_model(0), make_model(20, 0)):
        lazy = LazyAdam.make(len(model.params[0]), "cpu", F64)
        before = model.to("cpu", F64)
        records = make_records(model.forward(5))
        for _ in range(2):
            rows = model.forward(5, exp_avgs=model.exp_avgs, exp_avg_sqs=model.exp_avg_sqs, lazy=lazy)
            model.update(rows, records, lazy=lazy)
        assert all(torch.equal(p, q) for p, q in zip(model.params, before.params, strict=True))
        splat_flush(model.params, model.exp_avgs, model.exp_avg_sqs, lazy)
        for _ in range(2):
            before.update(before.forward(5), records)
        for p, q in zip(model.params, before.params, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)


def test_supported_options_of_lazy_adam() -> None:
    assert lazy_serves((0.9, 0.999), 1e-15) and lazy_serves((0.0, 0.5), 0.0)
    for betas, eps in (((0.9, 0.999), 1e-8), ((0.9, 0.8), 1e-15), ((0.9, 1.0), 1e-15)):
        assert not lazy_serves(betas, eps)


def test_the_registered_operators() -> None:
    model, lazy = make_model(20), LazyAdam.make(20, "cpu", F64)
    lists = (model.params, model.exp_avgs, model.exp_avg_sqs)
    state = (lazy.last, lazy.table, lazy.steps)
    ops = torch.ops.ns_multigpu
    torch.library.opcheck(ops.splat_flush, (*lists, *state), test_utils="test_schema")
    cameras = (model.viewmats, model.Ks, model.sizes)
    inputs = (*model.params, *cameras, 3, 0.3, 0.01, 1e9, True, 60, *lists[1:], *state)
    torch.library.opcheck(ops.splat_forward_lazy, inputs, test_utils="test_schema")
