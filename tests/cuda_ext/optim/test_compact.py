"""Adam's moments as bfloat16, rounded up or down at random: the rounding itself, and runs of steps with it."""

import copy
import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cuda_ext import compiler_problem
from cuda_ext.build.native import required_compiler
from cuda_ext.ops.optim.adam import FusedAdam, adam_step, adam_step_torch, fused_step
from cuda_ext.ops.optim.compact_adam import CompactAdam
from cuda_ext.ops.optim.lazy_adam import splat_flush
from cuda_ext.reference.compact import as_floats, compacted, flush_salts, step_salts
from tests.cuda_ext.compact_moments import BF16, a_block, compact, errors, spacing, still_gradients_scalars
from tests.cuda_ext.fused_steps import make_model, make_records
from tests.cuda_ext.lazy_steps import RATES, StepRun, fresh_model, step_scalars
from tests.lib.ranks import DEVICES

native = pytest.mark.usefixtures("native")
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, 1.0, -1.5, 2.0**-133, -(2.0**-126), 3.3895313892515355e38]
"""Numbers that bfloat16 holds."""

_CODE = r"""
#include "common/compact.h"
using namespace nsmg;
extern "C" void compact(uint32_t salt, const float* m, const float* v, int n, uint16_t* m16, uint16_t* v16,
                        float* back) {
  for (int i = 0; i < n; ++i) {
    const CompactMoments both = compacted(salt, m[i], v[i]);
    m16[i] = both.moment1.bits;
    v16[i] = both.moment2.bits;
    back[i] = widened(both.moment1);
  }
}
extern "C" uint32_t salt_of(const float* three, uint32_t before) {
  return dither_salt(three[0], three[1], three[2], before);
}
extern "C" uint32_t salt_of_tensor(uint32_t salt, uint32_t tensor) { return tensor_salt(salt, tensor); }
"""


def numbers(count: int, seed: int = 0) -> Tensor:
    """Of many sizes and both signs."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=g) * torch.logspace(-30, 30, count)[torch.randperm(count, generator=g)]


def views(step: int, count: int = 1) -> Tensor:
    return torch.rand(count, 4, 4, generator=torch.Generator().manual_seed(step))


def salts(count: int) -> Tensor:
    return torch.stack([step_salts(step_scalars(k, torch.float32), views(k))[k % 6] for k in range(count)])


# ---- the rounding ----


def test_on_average_the_exact_value() -> None:
    """Many values in one step, and one value in many steps; each goes to either neighbour and no further."""
    values = numbers(400_000)
    first, second = compacted(salts(1)[0], values, numbers(400_000, seed=1).abs())
    apart = errors(first, values)
    assert apart.abs().max() <= 1 and (apart > 0).float().mean() == pytest.approx(0.5, abs=0.01)
    assert abs(float(apart.mean())) < 5 * float(apart.std()) / len(apart) ** 0.5
    assert float(apart.std()) == pytest.approx((1 / 6) ** 0.5, rel=0.01), "variance of unbiased rounding"
    of_second = errors(second, numbers(400_000, seed=1).abs())
    both = torch.stack([apart, of_second])
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.01, "a point's moments must be rounded independently"
    value = torch.tensor([1.0 + 0.3 * 2**-7])
    ups = sum(float(compacted(salt, value, value)[0]) > 1 for salt in salts(4000))
    assert ups / 4000 == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("place", [0, 1])
def test_bfloat16_values_are_not_rounded_again(place: int) -> None:
    held = torch.cat([torch.tensor(SPECIAL), numbers(5000).to(BF16).float()])
    for salt in salts(20):
        rounded = compacted(salt, *((held, held.flip(0)) if place == 0 else (held.flip(0), held)))[place]
        assert torch.equal(rounded.view(torch.int16), held.to(BF16).view(torch.int16)), "signs of zeros too"
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    for salt in salts(20):
        assert all(torch.isnan(rounded).all() for rounded in compacted(salt, nans, nans))


def test_the_kernels_round_as_the_reference(tmp_path: Path) -> None:
    if problem := compiler_problem():
        pytest.skip(problem)
    source, target = tmp_path / "compact.cpp", tmp_path / "compact.so"
    source.write_text(_CODE)
    include = Path(__file__).parents[3] / "cuda_ext" / "csrc"
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", f"-I{include}"]
    subprocess.run([*required_compiler(), *flags, str(source), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.salt_of.restype = library.salt_of_tensor.restype = ctypes.c_uint32

    def salt_of(three: Tensor, before: int = 0) -> int:
        return library.salt_of(ctypes.c_void_p(three.contiguous().data_ptr()), ctypes.c_uint32(before))

    scalars, table, viewmats = step_scalars(7, torch.float32), a_block(1, 9).table, views(7, 2)
    of_step = salt_of(scalars[0, [0, 4, 5]])
    cases = [
        (of_step, step_salts(scalars, viewmats[:0])),
        (salt_of(viewmats[0].view(-1)[[0, 3, 7]], of_step), step_salts(scalars, viewmats)),
        (salt_of(table[0, 0, [0, 2, 3]]), flush_salts(table)),
    ]
    for mine, expected in cases:
        for i in range(6):
            assert library.salt_of_tensor(ctypes.c_uint32(mine), i) == int(expected[i]) % 2**32
    nan = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    m = torch.cat([numbers(20_000), torch.tensor(SPECIAL), nan])
    v = m.flip(0).contiguous()
    first, second, back = torch.empty(len(m), dtype=BF16), torch.empty(len(m), dtype=BF16), torch.empty(len(m))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (m, v, first, second, back)]
    salt = step_salts(scalars, viewmats)[3]
    library.compact(ctypes.c_uint32(int(salt) % 2**32), *pointers[:2], len(m), *pointers[2:])
    for found, expected in zip((first, second), compacted(salt, m, v), strict=True):
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(back.view(torch.int32), first.float().view(torch.int32))


@pytest.mark.parametrize("late", [False, True])
def test_moment_without_gradients_decays(late: bool) -> None:
    """At 1/1000 a step, which rounding to the nearest would not show; also when Adam's numbers change no more."""
    count, steps, g = 3000, 1200, torch.Generator().manual_seed(2)
    exp_avg_sq = torch.rand(count, generator=g).add(0.5).to(BF16)
    nearest, start = exp_avg_sq.clone(), exp_avg_sq.double()
    exp_avg, value = torch.randn(count, generator=g).to(BF16), torch.zeros(count)
    for step in range(steps):
        scalars = step_scalars(0 if late else step, torch.float32)[:1]
        if late:
            scalars[:, 4:6] = 1.0
        salt = step_salts(scalars, views(step % 300))
        with as_floats([exp_avg], [exp_avg_sq], lambda salt=salt: salt) as (m, v):
            adam_step_torch([value], [torch.zeros(count)], m, v, scalars, False)
        nearest.mul_(0.999)
    ratio = exp_avg_sq.double() / start
    expected = 0.999**steps
    # In the end moment1 is zero everywhere, and what has the same moment2 is rounded alike.
    assert float(ratio.mean()) == pytest.approx(expected, rel=0.03)
    assert float(ratio.std()) < 0.06
    assert (nearest.double() / start).mean() > 0.99, "rounded to the nearest it stands still"


# ---- steps ----


@native
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lazy", [False, True])
def test_compact_run_is_close_to_the_full_run(lazy: bool, device: str) -> None:
    full = StepRun(fresh_model(300, dtype=torch.float32).to(device), lazy=lazy)
    ours = StepRun(compact(fresh_model(300, dtype=torch.float32), device), lazy=lazy)
    before = [p.clone() for p in full.model.params]
    for step in range(30):
        for run in (full, ours):
            run.step(step)
            if lazy and step in (11, 29):
                run.flush()
    assert all(m.dtype == BF16 for m in (*ours.model.exp_avgs, *ours.model.exp_avg_sqs))
    assert (full.statistics["seen"] != ours.statistics["seen"]).float().mean() < 0.02, "of points at a rim"
    for i, (a, b, start) in enumerate(zip(full.model.params, ours.model.params, before, strict=True)):
        apart, moved = (a - b).abs().mean() / RATES[i], (a - start).abs().mean() / RATES[i]
        assert apart < 0.03 * moved, f"{i}: {apart} of {moved} steps"
    for a, b in zip(full.model.exp_avgs, ours.model.exp_avgs, strict=True):
        assert (a - b.float()).norm() < 0.02 * a.norm()
    for a, b in zip(full.model.exp_avg_sqs, ours.model.exp_avg_sqs, strict=True):
        ratio = b.double()[a > 0] / a.double()[a > 0]
        assert float(ratio.mean()) == pytest.approx(1.0, abs=5e-3) and float(ratio.std()) < 0.04


@native
def test_step_rounds_once_and_only_its_own_rows() -> None:
    """From the float32 results of the same step, to the bit; the steps that were missed and the one that is taken."""
    for lazy in (False, True):
        ours = StepRun(compact(fresh_model(200, dtype=torch.float32)), lazy=lazy)
        for step in range(6):
            ours.step(step)
        exact = copy.deepcopy(ours)
        exact.model.exp_avgs = [m.float() for m in exact.model.exp_avgs]
        exact.model.exp_avg_sqs = [v.float() for v in exact.model.exp_avg_sqs]
        held = [m.clone() for m in (*ours.model.exp_avgs, *ours.model.exp_avg_sqs)]
        for run in (ours, exact):
            run.step(6)
        salt = step_salts(ours.model.scalars, ours.model.viewmats)
        drawn = torch.zeros(200, dtype=torch.bool)
        drawn[ours.rows.point_ids[ours.rows.radii[:, 0] > 0].unique().long()] = True
        assert 20 < int(drawn.sum()) < 190
        for i in range(6):
            assert torch.equal(ours.model.params[i], exact.model.params[i])
            pair = compacted(salt[i], exact.model.exp_avgs[i], exact.model.exp_avg_sqs[i])
            assert torch.equal(ours.model.exp_avgs[i], pair[0]) and torch.equal(ours.model.exp_avg_sqs[i], pair[1])
            if lazy:
                assert torch.equal(ours.model.exp_avgs[i][~drawn], held[i][~drawn])
                assert torch.equal(ours.model.exp_avg_sqs[i][~drawn], held[6 + i][~drawn])


@native
def test_the_place_of_a_point_does_not_matter() -> None:
    """A flush, and a step without gradients, of points in another order: the same moments in that order."""
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    one = compact(make_model(120))
    other = compact(make_model(120))
    for lists in (other.params, other.exp_avgs, other.exp_avg_sqs):
        lists[:] = [t[order] for t in lists]
    block = a_block(120, 9)
    moved = copy.deepcopy(block)
    moved.last.copy_(block.last[order])
    for model, lazy in ((one, block), (other, moved)):
        splat_flush(model.params, model.exp_avgs, model.exp_avg_sqs, lazy)
        model.scalars = still_gradients_scalars(50)
        rows = model.forward(0)
        model.update(rows, make_records(rows))
    for kind in ("params", "exp_avgs", "exp_avg_sqs"):
        assert all(torch.equal(a[order], b) for a, b in zip(getattr(one, kind), getattr(other, kind), strict=True))


@native
def test_disabled_step_changes_nothing() -> None:
    model = compact(make_model(50))
    held = [*model.params, *model.exp_avgs, *model.exp_avg_sqs]
    before = [t.clone() for t in held]
    model.scalars = torch.tensor([0.0, 1, 1, 1, 1, 1, 0, 0]).repeat(6, 1)
    rows = model.forward(100)
    model.update(rows, make_records(rows))
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


def test_spacing() -> None:
    assert spacing(torch.tensor([1.0, 1.99, 2.0, 0.75])).tolist() == [2**-7, 2**-7, 2**-6, 2**-8]


# ---- the optimizer ----


def make_optimizer(kind: type[FusedAdam]) -> tuple[torch.nn.Parameter, FusedAdam]:
    param = torch.nn.Parameter(torch.ones(5, 2))
    param.grad = torch.linspace(-1, 1, 10).view(5, 2)
    return param, kind([param], lr=0.1)


def test_optimizer_step_is_refused() -> None:
    param, ours = make_optimizer(CompactAdam)
    with pytest.raises(RuntimeError, match="takes no steps of its own"):
        ours.step()
    with pytest.raises(TypeError, match="Compact moments are for splat_update"):
        fused_step([ours])
    assert torch.equal(param, torch.ones(5, 2))
    moments = [torch.zeros(3, dtype=BF16)]
    with pytest.raises(TypeError, match=r"its moments are torch\.bfloat16"):
        adam_step([torch.ones(3)], [torch.ones(3)], moments, moments, torch.zeros(1, 8))


def test_states_are_loaded_from_either_kind() -> None:
    full, theirs = make_optimizer(FusedAdam)
    theirs.step()
    param, ours = make_optimizer(CompactAdam)
    ours.load_state_dict(theirs.state_dict())
    state, other = ours.state[param], theirs.state[full]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == BF16 and float(state["step"]) == 1
    assert torch.equal(state["exp_avg"], other["exp_avg"].to(BF16))
    again, third = make_optimizer(CompactAdam)
    third.load_state_dict(ours.state_dict())
    assert torch.equal(third.state[again]["exp_avg_sq"], state["exp_avg_sq"])
    assert third.state[again]["exp_avg_sq"].dtype == BF16
    back, fourth = make_optimizer(FusedAdam)
    fourth.load_state_dict(ours.state_dict())
    assert fourth.state[back]["exp_avg"].dtype == torch.float32
    assert torch.equal(fourth.state[back]["exp_avg"], state["exp_avg"].float())
    fourth.step()
