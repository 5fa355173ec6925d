"""FusedAdam on CPU: torch.optim.Adam's numbers and state, one by one and many together."""

import copy
import math
from typing import Any

import pytest
import torch

from cuda_ext.ops.optim.adam import AdamStep, FusedAdam, ScalarRing, adam_scalars, adam_step, fused_step, shorten_step
from tests.cuda_ext.adams import SHAPES, assert_same, make_params, run_steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_as_torch(dtype: torch.dtype) -> None:
    assert_same(*(run_steps(kind, "cpu", dtype) for kind in ("torch", "alone")), rtol=2e-6)


def test_fused_update_equals_separate_updates() -> None:
    assert_same(run_steps("together", "cpu"), run_steps("alone", "cpu"), rtol=0)


def test_counted_steps_equal_separate_updates() -> None:
    assert_same(run_steps("counted", "cpu"), run_steps("alone", "cpu"), rtol=0)


def test_state_converts_in_both_directions() -> None:
    for first, second in ((torch.optim.Adam, FusedAdam), (FusedAdam, torch.optim.Adam)):
        params = make_params("cpu")
        old: Any = first(params, lr=0.1)
        for p in params:
            p.grad = torch.ones_like(p)
        old.step()
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        new: Any = second(copies, lr=0.7)
        new.load_state_dict(copy.deepcopy(old.state_dict()))
        assert old.state_dict()["param_groups"] == new.state_dict()["param_groups"]
        for p, q in zip(params, copies, strict=True):
            p.grad, q.grad = torch.full_like(p, 2.0), torch.full_like(q, 2.0)
        old.step()
        new.step()
        for p, q in zip(params, copies, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)


def test_unused_and_empty_parameters_are_unchanged() -> None:
    used, unused, empty = (torch.nn.Parameter(torch.ones(n)) for n in (3, 3, 0))
    used.grad, empty.grad = torch.ones(3), torch.ones(0)
    optimizer = FusedAdam([used, unused, empty], lr=0.1)
    optimizer.step()
    assert list(optimizer.state) == [used] and (unused == 1).all() and (used < 1).all()


def test_options_of_torch_are_torchs() -> None:
    results = []
    for kind in (torch.optim.Adam, FusedAdam):
        p = torch.nn.Parameter(torch.ones(4))
        optimizer: Any = kind([p], lr=0.1, weight_decay=0.3, amsgrad=True)
        for _ in range(3):
            p.grad = torch.arange(4.0)
            optimizer.step()
        results.append((p.detach(), optimizer.state[p]["max_exp_avg_sq"]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(ValueError, match="weight decay"):
        AdamStep([optimizer])


def test_schedulers_and_hooks_see_the_step(recwarn: pytest.WarningsRecorder) -> None:
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    plain, hooked = FusedAdam([p], lr=0.1), FusedAdam([q], lr=0.1)
    calls: list[str] = []
    hooked.register_step_post_hook(lambda *_: calls.append("after"))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (plain, hooked)]
    for _ in range(2):
        p.grad, q.grad = torch.ones(2), torch.ones(2)
        fused_step([plain, hooked])
        for scheduler in schedulers:
            scheduler.step()
    assert calls == ["after"] * 2 and not recwarn.list
    assert torch.equal(p, q)
    torch.testing.assert_close(p.detach(), torch.full((2,), 1 - 0.1 - 0.05))


def test_replaced_parameter_keeps_its_state() -> None:
    """Densification replaces parameters and keeps the state of their optimizers."""
    found = []
    for kind in (torch.optim.Adam, FusedAdam):
        p = torch.nn.Parameter(torch.ones(5, 3))
        optimizer: Any = kind([p], lr=0.1)
        p.grad = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        state = optimizer.state.pop(p)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.cat([state[key], torch.zeros(2, 3)])
        new = torch.nn.Parameter(torch.cat([p.detach(), p.detach()[:2]]))
        optimizer.param_groups[0]["params"] = [new]
        optimizer.state[new] = state
        new.grad = torch.ones(7, 3)
        optimizer.step()
        found.append(new.detach())
    torch.testing.assert_close(found[0], found[1], rtol=2e-6, atol=1e-7)


def test_gradients_can_be_cleared() -> None:
    p = torch.nn.Parameter(torch.ones(5))
    p.grad = torch.ones(5)
    fused_step([FusedAdam([p])], set_grads_to_zero=True)
    assert (p.grad == 0).all() and (p < 1).all()


def test_scalars() -> None:
    line = adam_scalars(0.1, (0.9, 0.999), 1e-15, 3)
    expected = [0.1, 0.9, 0.999, 1e-15, 1 / (1 - 0.9**3), 1 / math.sqrt(1 - 0.999**3), 0.1, 0.001]
    assert line == pytest.approx(expected, rel=1e-12)


def test_upload_within_a_graph_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gpu = torch.device("cuda")
    for ring, name in (
        (ScalarRing(gpu, 2), "A step's numbers"),
        (ScalarRing(gpu, 2, what="The cameras"), "The cameras"),
    ):
        with pytest.raises(RuntimeError, match=f"^{name} cannot be uploaded within a CUDA graph"):
            ring.upload([[1.0, 2.0]], torch.float32)


def test_opcheck() -> None:
    g = torch.Generator().manual_seed(0)
    lists = [[torch.rand(n, generator=g) for n in (3, 4)] for _ in range(4)]
    scalars = torch.tensor([adam_scalars(0.1, (0.9, 0.999), 1e-8, 1)] * 2)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.ns_multigpu.adam_step, (*lists, scalars, True), test_utils=checks)
    adam_step([], [], [], [], scalars[:0])
    assert SHAPES


def test_a_shortened_step_is_a_part_of_adams() -> None:
    moved: list[torch.Tensor] = []
    for part in (None, 0.25):
        param = torch.nn.Parameter(torch.ones(5, 3))
        optimizer = torch.optim.Adam([param], lr=0.1)
        param.grad = torch.linspace(-1, 1, 15).reshape(5, 3)
        if part is not None:
            shorten_step(optimizer, torch.full((5, 1), part))
        optimizer.step()
        moved.append(param.detach() - 1)
    torch.testing.assert_close(moved[1], 0.25 * moved[0])
    with pytest.raises(TypeError, match="SGD has no first moment"):
        shorten_step(torch.optim.SGD([param], lr=0.1), torch.ones(5, 1))
