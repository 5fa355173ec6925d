"""Compact moments in the fused CUDA kernels: against what the CPU composes, to the bit where floats are the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.optim.fused import PARAMETERS
from cuda_ext.ops.optim.lazy_adam import LazyAdam, splat_flush
from tests.cuda_ext.compact_moments import BF16, a_block, compact, errors, spacing, still_gradients_scalars
from tests.cuda_ext.fused_steps import Model, make_model, make_records, to
from tests.cuda_ext.lazy_steps import (
    CAPACITY,
    RATES,
    StepRun,
    assert_same_bits,
    differences,
    fresh_model,
    in_graphs,
    row_records,
    step_scalars,
)

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
F64 = torch.float64
CASES = [
    # points, views, degree, bases stored, antialiased
    (2000, 3, 3, 15, False),
    (999, 1, 2, 15, True),
    (701, 2, 1, 3, False),
    (257, 2, 0, 0, False),
    (31, 2, 0, 15, False),
]


def same_bits(ours: Model, theirs: Model) -> None:
    for kind in ("exp_avgs", "exp_avg_sqs"):
        for name, a, b in zip(PARAMETERS, getattr(ours, kind), getattr(theirs, kind), strict=True):
            assert a.dtype == b.dtype == BF16
            assert torch.equal(a.cpu().view(torch.int16), b.view(torch.int16)), f"{kind} of {name}"


def rounded_as_they_must_be(found: Tensor, exact: Tensor, tolerance: float, name: str) -> None:
    """One of the neighbours, but for what float32 makes of sums; and on average the exact value."""
    exact = exact.double()
    error = (found.double().cpu() - exact).abs()
    assert (error <= 1.001 * spacing(exact) + tolerance * float(exact.abs().max())).all(), name
    sure = exact.abs() > 0.1 * exact.abs().max()  # elements whose neighbour float32 sums cannot change
    apart = errors(found[sure.to(found.device)], exact[sure])
    if len(apart) > 100:
        assert abs(float(apart.mean())) < 5 * 0.41 / len(apart) ** 0.5 + 0.01, name
        assert (apart.abs() > 0.05).float().mean() > 0.1, f"{name}: not rounded at all"


@pytest.mark.parametrize("absgrad", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_update(case: tuple[Any, ...], absgrad: bool) -> None:
    points, views, degree, bases, antialiased = case
    ours = compact(make_model(points, views, seed=points, rest=bases, spread=1.5), DEVICE)
    exact = ours.to("cpu", F64)
    before = ours.to("cpu", F64)
    settings = {"antialiased": antialiased, "absgrad": absgrad}
    found_rows = ours.forward(points * views + 64, degree, antialiased=antialiased)
    rows = to(found_rows, "cpu", F64)
    records = make_records(rows).float()
    exact.update(rows, records.double(), degree, **settings)
    ours.update(found_rows, records.to(DEVICE), degree, **settings)
    drawn = torch.zeros(points, dtype=torch.bool)
    drawn[rows.point_ids[rows.radii[:, 0] > 0].unique().long()] = True
    assert drawn.any() and not drawn.all()
    for i, name in enumerate(PARAMETERS):
        if ours.params[i].numel() == 0:
            continue
        rounded_as_they_must_be(ours.exp_avgs[i], exact.exp_avgs[i], 2e-4, f"{name} exp_avg")
        rounded_as_they_must_be(ours.exp_avg_sqs[i], exact.exp_avg_sqs[i], 5e-4, f"{name} exp_avg_sq")
        # The step itself is of moments that have not been rounded yet.
        moved, wanted = ours.params[i].cpu().double() - before.params[i], exact.params[i] - before.params[i]
        atol = max(1e-3 * float(wanted.abs().max()), 4e-7 * float(before.params[i].abs().max()))
        torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_a_step_without_gradients_has_the_bits_of_the_reference(case: tuple[Any, ...]) -> None:
    points, views, degree, bases, _ = case
    ours = compact(make_model(points, views, seed=points, rest=bases), DEVICE)
    theirs = ours.to("cpu", torch.float32)
    theirs = compact(theirs)
    for step in (3, 50, 20_000):
        for model in (ours, theirs):
            model.scalars = still_gradients_scalars(step).to(model.params[0].device)
            rows = model.forward(0, degree)
            model.update(rows, make_records(rows), degree)
        same_bits(ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_a_flush_has_the_bits_of_the_reference(case: tuple[Any, ...]) -> None:
    points, views, _, bases, _ = case
    ours = compact(make_model(points, views, seed=points, rest=bases), DEVICE)
    theirs = compact(ours.to("cpu"))
    before = compact(theirs)
    for model, device in ((ours, DEVICE), (theirs, "cpu")):
        splat_flush(model.params, model.exp_avgs, model.exp_avg_sqs, a_block(points, 11, device))
    same_bits(ours, theirs)
    assert not torch.equal(theirs.exp_avgs[0], before.exp_avgs[0])
    for i, rate in enumerate(RATES):
        apart = (ours.params[i].cpu() - theirs.params[i]).abs()
        assert apart.numel() == 0 or float(apart.max()) < 2e-3 * rate + 1e-6 * float(theirs.params[i].abs().max())


@pytest.mark.parametrize("case", [(900, 2, 3, 15, False), *CASES[1:]])
def test_a_lazy_step_is_what_the_cpu_composes(case: tuple[Any, ...]) -> None:
    """From one state in the middle of a block: the rows, the update and the table."""
    points, views, degree, bases, antialiased = case
    model = compact(fresh_model(points, views, torch.float32, bases), DEVICE)
    ours = StepRun(model, True, degree, antialiased=antialiased)
    for step in range(9):
        ours.step(step)
    assert ours.lazy is not None
    theirs = StepRun(model.to("cpu", F64), True, degree, antialiased=antialiased)
    theirs._viewmats = ours._viewmats.cpu().double()
    held = (ours.lazy.last.to("cpu", copy=True), ours.lazy.table.cpu().double(), ours.lazy.steps.to("cpu", copy=True))
    theirs.lazy = LazyAdam(*held)
    before = theirs.model.to("cpu", F64)
    rows, expected = ours.forward(9), theirs.forward(9)
    assert max(int(rows.count), int(expected.count)) <= CAPACITY, "the two would keep other rows"
    alive = [set(zip(r.view_ids[r.radii[:, 0] > 0].tolist(), r.point_ids[r.radii[:, 0] > 0].tolist(), strict=True))
             for r in (rows, expected)]  # fmt: skip
    assert len(alive[0] ^ alive[1]) <= 1, "of a point at the rim"
    ours.model.scalars, theirs.model.scalars = step_scalars(9, torch.float32).to(DEVICE), step_scalars(9)
    same = to(rows, "cpu", F64)
    for one, its in ((ours, rows), (theirs, same)):
        one.model.update(its, row_records(its, 9), degree, lazy=one.lazy, antialiased=antialiased)
    assert torch.equal(ours.lazy.last.cpu(), theirs.lazy.last) and int(ours.lazy.steps) == 10
    drawn = torch.zeros(points, dtype=torch.bool)
    drawn[same.point_ids[same.radii[:, 0] > 0].unique().long()] = True
    for i, name in enumerate(PARAMETERS):
        if model.params[i].numel() == 0:
            continue
        for kind in ("exp_avgs", "exp_avg_sqs"):
            found, exact = getattr(model, kind)[i], getattr(theirs.model, kind)[i]
            rounded_as_they_must_be(found, exact, 1e-3, f"{kind} of {name}")
            assert torch.equal(found.cpu()[~drawn].double(), getattr(before, kind)[i][~drawn])
    for name, difference in differences(ours, theirs, mean=True).items():
        assert difference < 1e-2, f"{name}: {difference}"


def test_a_block_in_a_graph() -> None:
    """A step and a flush, each captured once, are those that are launched; and neither waits for the device."""
    plain, graphed, warm = (StepRun(compact(fresh_model(900, dtype=torch.float32), DEVICE), True) for _ in range(3))
    in_graphs(plain, graphed, warm)
    assert_same_bits(plain, graphed)


def test_unsupported_arguments_are_named() -> None:
    ops = torch.ops.ns_multigpu
    lazy = LazyAdam.make(20, DEVICE)
    state = (lazy.last, lazy.table, lazy.steps)
    mixed = compact(make_model(20), DEVICE)
    mixed.exp_avg_sqs[3] = mixed.exp_avg_sqs[3].float()
    with pytest.raises(TypeError, match="exp_avg_sq of logits is Float; moments must all be Float, or all BFloat16"):
        ops.splat_flush(mixed.params, mixed.exp_avgs, mixed.exp_avg_sqs, *state)
    half = compact(make_model(20), DEVICE)
    half.exp_avgs = [m.half() for m in half.exp_avgs]
    with pytest.raises(TypeError, match="exp_avg of means is Half"):
        ops.splat_flush(half.params, half.exp_avgs, half.exp_avg_sqs, *state)
    shifted = compact(make_model(20), DEVICE)
    shifted.exp_avgs[1] = torch.zeros(81, dtype=BF16, device=DEVICE)[1:].view(20, 4)
    with pytest.raises(ValueError, match="16 bytes"):
        ops.splat_flush(shifted.params, shifted.exp_avgs, shifted.exp_avg_sqs, *state)
